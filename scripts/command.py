"""What the commands here share: whatever goes wrong becomes one line on stderr and exit status 1."""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, Optional

_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@contextlib.contextmanager
def requirements() -> Iterator[None]:
    """Around imports of what may not be installed: ends the program with one line that says what is missing."""
    try:
        yield
    except ImportError as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: error: {error}: pip install -r requirements.txt")


with requirements():
    from huggingface_hub.errors import HfHubHTTPError

    try:
        import httpx2 as httpx
    except ImportError:  # huggingface_hub before 2
        import httpx


class CommandError(Exception):
    """The command cannot do what was asked; the message says what was found and what was expected."""


def is_repo_id(text: str) -> bool:
    """Whether it has the form ORG/NAME."""
    return _REPO_ID.fullmatch(text) is not None


def check_repo_id(text: str) -> None:
    """Raises CommandError unless the argument ORG/NAME has that form."""
    if not is_repo_id(text):
        raise CommandError(f"ORG/NAME: expected a repository such as lossless-kernels/lossless-kernels, found {text!r}")


def exit_status(name: str, command: Callable[[], Optional[int]]) -> int:
    """Runs a command; errors that a user can meet are printed after its name, all others are left to Python."""
    try:
        return command() or 0
    except (CommandError, OSError, ValueError, httpx.HTTPError) as error:
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
    if isinstance(error, httpx.RequestError):
        return f"the Hub at {error.request.url.host}:{error.request.url.port or 443} does not answer: {message}"
    if isinstance(error, OSError) and error.filename and str(error.filename) not in message:
        return f"{error.filename}: {message}"
    return message
