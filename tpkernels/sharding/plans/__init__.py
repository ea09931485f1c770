"""What we know about particular models: one file each, a few lines.

``CLASSES``: a model that has a module of one of these classes is of this kind.  ``PLAN``: styles by patterns of module
names.  ``ATTRIBUTES``: attributes that count features or heads, by patterns.  ``HEADS``: configuration keys whose
values must divide over the ranks.  Everything is still proven by data flow where the model can be traced; the file is
what remains where it can not.
"""
