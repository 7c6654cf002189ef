"""``python -m poimen_exp [+experiment=NAME] [KEY=VALUE ...] [--multirun]``"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from poimen_exp.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    PoimenError,
    RunFailed,
    path_trouble,
)
from poimen_exp.wording import no_progress_bars


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    from poimen_exp.config import hydra_main

    no_progress_bars()
    try:
        hydra_main.run(sys.argv[1:] if argv is None else argv, _check, _task)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output is gone, as with ``| head``; so must be what is left of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except PoimenError as error:
        return _say(str(error), error.exit_code)
    except (HydraException, OmegaConfBaseException) as error:
        return _say(hydra_main.explain(error), EXIT_REFUSED)
    except OSError as error:
        return _say(path_trouble(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return _say("interrupted", EXIT_INTERRUPTED)
    return EXIT_DONE


def _say(message: str, code: int) -> int:
    print(f"poimen_exp: {message}", file=sys.stderr)
    return code


def _check(cfg: DictConfig) -> None:
    from poimen_exp import app

    app.check(cfg)


def _task(cfg: DictConfig) -> float | None:
    """The run boundary: what goes wrong inside is a failed run with its traceback, never a refusal by Hydra."""
    from poimen_exp import app

    try:
        return app.run(cfg)
    except PoimenError:
        raise
    except (Exception, SystemExit) as error:  # a sys.exit somewhere below is no end of a run either
        traceback.print_exc()
        raise RunFailed(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
