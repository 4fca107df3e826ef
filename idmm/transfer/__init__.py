"""The transfer grid of stage 3: plan, run in order or on Ray, status.

``idmm.transfer(config)`` works although importing one of the modules binds ``idmm.transfer`` to the
package: its class is replaced, as Python's reference allows ("Customizing module attribute
access").
"""

import sys
import types


class _Package(types.ModuleType):
    def __call__(self, config):
        """Run a grid, see :func:`idmm.transfer.grid.transfer`."""
        from idmm.transfer.grid import transfer

        return transfer(config)


sys.modules[__name__].__class__ = _Package
