"""Page-locking by the CUDA driver."""

from __future__ import annotations

from typing import Any

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: locked for all contexts, as torch's own is


class CudaRegistrar:
    """A ``Registrar`` for the memory that one CUDA device copies from and to.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> None:
        """Lock whole pages.

        Raises:
            RuntimeError: If the driver refuses, with its reason.
        """
        # The current device is each thread's own. Without setting it, the call would
        # make a context, of some hundred MiB, on device 0.
        with torch.cuda.device(self._device):
            _check(_runtime().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        """Unlock them, once no copy is under way.

        Raises:
            RuntimeError: If the driver refuses, with its reason.
        """
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            _check(_runtime().cudaHostUnregister(address))


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(result: int) -> None:
    code = int(result)
    if code != 0:
        raise torch.cuda.CudaError(code)
