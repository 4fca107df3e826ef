"""Stage 1: learn a backbone from images alone. See --help."""

import sys

from idmm.cli import main

sys.exit(main(["pretrain", *sys.argv[1:]], prog="pretrain.py"))
