"""Makes the project logs that ship: ``python scripts/make_quickstart_corpus.py --out DIR [--seed S]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from poimen_exp.quickstart.corpus import SEED, make_corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpus; one that is there is replaced")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    print(make_corpus(options.out, options.seed, overwrite=True))


if __name__ == "__main__":
    main()
