"""A memory fence, so that other cores see stores in program order."""

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
    """Order all loads and stores of this thread before and after this call."""
    _fence()
