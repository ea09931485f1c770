"""A fifth backend, as somebody else would write one: this folder, and no other file.

``mailbox.py`` has what it owns in a group, ``ops.py`` its implementations; :func:`register` makes both known.
"""

from tests.backends.toy.mailbox import Mailbox
from tests.backends.toy.ops import register

__all__ = ["Mailbox", "register"]
