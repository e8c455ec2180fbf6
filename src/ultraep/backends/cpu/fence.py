"""A fence of the memory: what other cores see keeps the order in which it was done here."""

from numba import njit, types
from numba.extending import intrinsic


@intrinsic
def _fence(_typing):
    def emit(context, builder, _signature, _arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@njit(types.void(), cache=True)
def fence():
    """No load or store of this thread moves over this point, in either direction."""
    _fence()
