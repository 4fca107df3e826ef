"""Stage 3: pretrain on every source, fine-tune on every target, and fill a grid of accuracies. See
--help."""

import sys

from idmm.cli import main

sys.exit(main(["transfer", *sys.argv[1:]], prog="transfer.py"))
