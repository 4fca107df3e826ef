"""The transfer grid: plan, run anywhere, table and pictures. The package is callable: ``idmm.transfer(config)``."""

import sys
import types


class _Package(types.ModuleType):
    def __call__(self, config):
        """Runs a grid, see :func:`idmm.transfer.grid.transfer`."""
        from idmm.transfer.grid import transfer

        return transfer(config)


sys.modules[__name__].__class__ = _Package
