"""A CUDA platform that is not there, so that vLLM plans for a GPU without one.

`install(name, capability, memory_bytes)` has to run before anything else of vLLM is imported. It replaces
vllm.platforms.current_platform by a CUDA platform that reports these facts, and fills in the compiled modules and CUDA
calls that planning touches but does not need. Nothing is computed with it: models are built on the meta device.
"""

# ruff: noqa: PLC0415, SLF001 -- vLLM may only be imported after the platform is set, and has no public way to set it

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

CACHE = Path("~/.cache/kvwatch/oracle").expanduser()
_ENVIRONMENT = {
    "VLLM_CACHE_ROOT": str(CACHE),
    "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
    "TRITON_CACHE_DIR": str(CACHE / "triton"),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_COMPILED = ("vllm._C_stable_libtorch", "vllm._moe_C", "vllm._C")
_FLASH_ATTENTION = ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")
_ABSENT_PACKAGES = frozenset({"cuda", "cutlass", "torchvision"})
_KERNEL_NAMESPACES = frozenset({"_C", "_moe_C", "_C_cache_ops", "_C_custom_ar", "_rocm_C", "_vllm_fa3_C"})

# While a model is built, a kernel that does not exist is a function that does nothing.
building = {"now": False}


class Nothing:
    """Stands for a stream, an event or a workspace: any attribute is a call that returns None."""

    cuda_stream = 0
    stream_id = 0

    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_arguments, **_options: None


class _Kernel:
    """A compiled operator that is not there; equal to another of its name, so that it can be registered once."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_arguments: Any, **_options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __hash__(self) -> int:
        return hash(self.__name__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kernel) and other.__name__ == self.__name__


class _Module(types.ModuleType):
    """A compiled module whose questions ("is ... supported?", "fa_version...") are answered with yes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        answer = True if name.startswith(("is_", "fa_version")) else None
        return lambda *_arguments, **_options: answer


class _Boundless(type):
    """The type of `Anything`: every attribute of the class is the class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anything(metaclass=_Boundless):
    """Stands for any class, function, decorator or type of a module that is not there."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

    def __call__(self, *_arguments: Any, **_options: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __class_getitem__(cls, _key: Any) -> Any:
        return cls


class _AnyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class _AnyModuleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below the packages that are not there."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name.partition(".")[0] not in _ABSENT_PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _AnyModule(spec.name)

    def exec_module(self, _module: types.ModuleType) -> None: ...


def stub_absent_packages() -> None:
    """Empty modules in place of cuda-python, CUTLASS and torchvision, which some model files import at their top.

    vLLM asks what a model class can do in a process of its own, which would not know these modules: ask here instead.
    """
    importlib.import_module("transformers.models.auto.image_processing_auto")  # looks for torchvision once, at import
    sys.meta_path.append(_AnyModuleFinder())
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda question: question()


def install(name: str, capability: tuple[int, int], memory_bytes: int) -> None:
    """Replace the platform of this process."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    import torch

    torch.set_num_threads(1)
    _missing_kernels_do_nothing(torch)
    from vllm import platforms

    for module in _COMPILED:
        sys.modules.setdefault(module, types.ModuleType(module))
    for module in _FLASH_ATTENTION:
        package = _Module(module)
        package.__path__ = []
        sys.modules[module] = package
    platforms._current_platform = _platform(name, capability, memory_bytes)()
    _no_cuda_calls(torch)
    _meta_tensors_have_a_value(torch)


def _missing_kernels_do_nothing(torch: Any) -> None:
    original = torch._ops._OpNamespace.__getattr__

    def lookup(namespace: Any, name: str) -> Any:
        try:
            return original(namespace, name)
        except AttributeError:
            if building["now"] and namespace.name in _KERNEL_NAMESPACES and not name.startswith("__"):
                return _Kernel(name)
            if "support" in name:
                return lambda *_arguments, **_options: True
            raise

    torch._ops._OpNamespace.__getattr__ = lookup


def _meta_tensors_have_a_value(torch: Any) -> None:
    """Gemma 3n reads a constant out of a tensor while it is built; its value does not matter to the plan."""
    original = torch.Tensor.item
    torch.Tensor.item = lambda tensor: 1.0 if tensor.is_meta else original(tensor)


def _platform(name: str, capability: tuple[int, int], memory_bytes: int) -> Any:
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    answers = {
        "get_device_capability": lambda *_: DeviceCapability(*capability),
        "get_device_name": lambda *_: name,
        "get_device_total_memory": lambda *_: memory_bytes,
        "get_cuda_runtime_major": lambda *_: 12,
        "device_count": lambda *_: 8,
        "num_compute_units": lambda *_: 132,
        "check_if_supports_dtype": lambda *_: None,
        "import_kernels": lambda *_: None,
        "is_pin_memory_available": lambda *_: False,
        "is_fully_connected": lambda *_: True,
        "is_arch_support_pdl": lambda *_: False,
    }
    methods = {method: classmethod(functools.partial(_answer, answer)) for method, answer in answers.items()}
    return type("FakeCudaPlatform", (cuda.NonNvmlCudaPlatform,), methods)


def _answer(answer: Any, *arguments: Any, **_options: Any) -> Any:
    return answer(*arguments)


def _no_cuda_calls(torch: Any) -> None:
    from vllm import triton_utils

    class Config:
        def __init__(self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 2, **_options: Any) -> None:
            self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages

    triton_utils.triton.Config = Config
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.current_stream = lambda *_arguments, **_options: Nothing()
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_available = lambda: False
    torch.accelerator.current_device_index = lambda *_arguments, **_options: 0
    torch.accelerator.current_accelerator = lambda *_arguments, **_options: torch.device("cuda")
    torch.accelerator.device_count = lambda *_arguments, **_options: 8


def on_meta_device(torch: Any) -> Any:
    """A context in which tensors meant for CUDA are made on the meta device."""
    from torch.overrides import TorchFunctionMode

    class CudaToMeta(TorchFunctionMode):  # type: ignore[misc]  # torch is not installed where this is checked
        def __torch_function__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
            options = dict(options or {})
            device = options.get("device")
            if device is not None and (str(device).startswith("cuda") or isinstance(device, int)):
                options["device"] = torch.device("meta")
            return function(*arguments, **options)

    return CudaToMeta()
