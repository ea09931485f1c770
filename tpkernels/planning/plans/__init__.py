"""What we know about particular kinds of models: one file each, a few lines.

A model is of a kind if it has a module of one of the classes in ``CLASSES``.  ``PLAN`` maps patterns of module names to
styles.  It names what is expected, is printed beside what was found, and proves nothing: layers are cut together where
the data flow shows that they can be, and gathered where it does not.
"""
