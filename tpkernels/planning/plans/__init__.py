"""What we know about particular models: one file each, a few lines.

``CLASSES``: a model that has a module of one of these classes is of this kind.  ``PLAN``: styles by patterns of module
names.  A plan names what is expected, and is printed beside what was found; it proves nothing: layers are cut together
where the data flow shows that they can be, and gathered where it does not.
"""
