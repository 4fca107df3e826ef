"""The transfer grid of stage 3: plan, run anywhere, table and pictures.

The package is called like the other stages, ``idmm.transfer(config)``: its class is replaced, as Python's reference
allows ("Customizing module attribute access"), since an import of any of its modules binds ``idmm.transfer`` to it.
"""

import sys
import types


class _Package(types.ModuleType):
    def __call__(self, config):
        """Runs a grid, see :func:`idmm.transfer.grid.transfer`."""
        from idmm.transfer.grid import transfer

        return transfer(config)


sys.modules[__name__].__class__ = _Package
