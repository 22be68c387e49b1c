"""What programs here set up before they do anything else. Imports nothing that reads the environment."""

import os
import signal
import sys
from collections.abc import MutableMapping


def allow_no_telemetry(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets `kernels` reach a Hub although DO_NOT_TRACK or HF_HUB_DISABLE_TELEMETRY is set; call it before the import.

    kernels 0.17.2 then passes an empty user agent to huggingface_hub 2.4.0, whose header ends in "; ". The HTTP client
    refuses a header that ends in a space ("Illegal header value"). An origin comes after that space.
    """
    environment.setdefault("HF_HUB_USER_AGENT_ORIGIN", "unknown")


def clean_up_when_terminated() -> None:
    """SIGTERM and SIGHUP end the program as an exception does, so that it removes its temporary folders."""

    def end(number, frame):
        # `timeout make ...` and a terminal that closes send it twice, once through make.
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    # Windows has no SIGHUP.
    for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP
            signal.signal(number, end)
