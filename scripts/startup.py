"""Setup at the start of a program. Imports nothing that reads the environment."""

import os
import signal
import sys
from collections.abc import MutableMapping


def allow_no_telemetry(environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes `kernels` work with DO_NOT_TRACK or HF_HUB_DISABLE_TELEMETRY set. Call it before importing `kernels`.

    With either set, kernels 0.17.2 passes an empty user agent to huggingface_hub 2.4.0, whose header then ends in "; ". The
    HTTP client refuses a header that ends in a space ("Illegal header value"). An origin, which follows the space, avoids it.
    """
    environment.setdefault("HF_HUB_USER_AGENT_ORIGIN", "unknown")


def clean_up_when_terminated() -> None:
    """Makes SIGTERM and SIGHUP raise SystemExit, so that the program removes its temporary folders."""

    def end(number, frame):
        # `timeout make ...` and a closing terminal send the signal twice, once through make.
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    # Windows has no SIGHUP.
    for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP
            signal.signal(number, end)
