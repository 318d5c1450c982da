"""Exceptions for what a user can mend; the console commands print their sentence and exit with their status."""

TRY_AGAIN = 75  # the exit status where a new start may help: EX_TEMPFAIL of sysexits.h


class UserError(Exception):
    """What is wrong, where (file, line, key, host) and what to do, in one sentence."""

    status = 2


class NotFinite(UserError):
    """A loss or a gradient is infinite or not a number; the message says in which update and batch."""
