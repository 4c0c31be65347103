"""The one exception that means "the user can fix this": it ends in a single line on stderr and exit code 2."""


class CliError(Exception):
    """Bad input; the message names the argument, what was expected and what came."""
