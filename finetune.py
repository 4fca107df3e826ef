"""Stage 2: train a classifier on labels, from a backbone or from scratch. See --help."""

import sys

from idmm.cli import main

sys.exit(main(["finetune", *sys.argv[1:]], prog="finetune.py"))
