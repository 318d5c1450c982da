"""The one exception for mistakes that a user can make; the console commands print its sentence and exit with 2."""


class UserError(Exception):
    """What is wrong, where (file, line, key, host) and what to do, in one sentence."""


class NotFinite(UserError):
    """A loss or a gradient is infinite or not a number; the message says in which update and batch."""
