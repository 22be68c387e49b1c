"""What the commands here share: whatever goes wrong becomes one line on stderr and exit status 1."""

import sys
from typing import Callable, Optional

import httpx2
from huggingface_hub.errors import HfHubHTTPError


class CommandError(Exception):
    """The command cannot do what was asked; the message says what was found and what was expected."""


def exit_status(name: str, command: Callable[[], Optional[int]]) -> int:
    """Runs a command; errors that a user can meet are printed after its name, all others are left to Python."""
    try:
        return command() or 0
    except (CommandError, OSError, ValueError, httpx2.HTTPError) as error:
        print(f"{name}: error: {one_line(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
    return 1


def one_line(error: BaseException) -> str:
    """The message of an error, without line breaks, and with the address where the Hub was not understood."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        url = str(error.response.request.url)
        return message if url in message else f"{message} ({url})"
    if isinstance(error, httpx2.RequestError):
        return f"the Hub at {error.request.url.host}:{error.request.url.port or 443} does not answer: {message}"
    if isinstance(error, OSError) and error.filename and str(error.filename) not in message:
        return f"{error.filename}: {message}"
    return message
