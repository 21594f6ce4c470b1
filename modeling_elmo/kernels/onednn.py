"""oneDNN's matrix products, which torch does not offer in public.

torch computes `F.linear` in float32 with MKL, which is slow for few rows and, on AMD, for any number of rows. oneDNN is
in the same wheel and exact. Its operators have no gradients.

Shape suffixes: N rows; D width of the input; G width of the output.
"""

import platform
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .torch_state import is_right, private, question

LINEAR, LAYOUT = "ops.mkldnn._linear_pointwise", "ops.mkldnn._reorder_linear_weight"
HAS_BFLOAT16 = "ops.mkldnn._is_mkldnn_bf16_supported"


def onednn_product(
    inputs_ND: Tensor, weight_GD: Tensor, bias_G: Tensor | None, plus_NG: Tensor | None, clip: float | None
) -> Tensor:
    """`F.linear` by oneDNN, with an added matrix or clipped, for the dtypes of `onednn_dtypes`. It has no gradient."""
    if plus_NG is not None:
        return private(LINEAR).binary(inputs_ND, plus_NG, weight_GD, bias_G, "add")
    then, bounds = ("none", []) if clip is None else ("hardtanh", [-clip, clip])
    return private(LINEAR)(inputs_ND, weight_GD, bias_G, then, bounds, "")


def onednn_layout(weight_GD: Tensor) -> Tensor:
    """A copy of a weight in the layout of oneDNN."""
    return private(LAYOUT)(weight_GD.detach(), 32)  # 32: a typical number of rows


@cache
def onednn_dtypes() -> frozenset[torch.dtype]:
    """The dtypes in which oneDNN is there and equals `F.linear`. bfloat16 needs a CPU with its instructions."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    dtypes = (torch.float32, torch.bfloat16) if question(HAS_BFLOAT16)() else (torch.float32,)
    return frozenset(dtype for dtype in dtypes if is_right(LINEAR, partial(_equals_linear, dtype)))


def _equals_linear(dtype: torch.dtype) -> bool:
    inputs, weight, bias, plus = (torch.linspace(-2, 2, n).to(dtype) for n in (24, 40, 5, 15))
    inputs, weight, plus = inputs.view(3, 8), weight.view(5, 8).sin(), plus.view(3, 5)
    expected = F.linear(inputs, weight, bias).float()
    close = partial(torch.allclose, rtol=0.0, atol=1e-5 if dtype == torch.float32 else 0.1)
    return all(
        close(onednn_product(inputs, stored, bias, None, None).float(), expected)
        and close(onednn_product(inputs, stored, bias, plus, None).float(), expected + plus.float())
        and close(onednn_product(inputs, stored, bias, None, 1.0).float(), expected.clamp(-1, 1))
        for stored in (weight, onednn_layout(weight))
    )


HAS_AVX512_BFLOAT16 = "cpu._is_avx512_bf16_supported"


def processor_name() -> str:
    """The processor's name as torch knows it; older releases of torch do not, and the system may know less."""
    capabilities: dict[str, str] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities.get("cpu_name") or platform.processor() or platform.machine()


def bfloat16_obstacle() -> str | None:
    """The reason why this machine's CPU has no fast products in bfloat16, or `None`."""
    if not onednn_dtypes():
        return "this build of torch has no products of oneDNN"
    has_instructions = torch.bfloat16 in onednn_dtypes()
    if has_instructions and platform.machine().lower() in ("x86_64", "amd64"):
        # There oneDNN also emulates bfloat16 with older instructions, which takes longer than float32.
        has_instructions = question(HAS_AVX512_BFLOAT16)()
    return None if has_instructions else "this processor has no instructions for bfloat16"


def has_onednn(tensor: Tensor) -> bool:
    return tensor.dtype in onednn_dtypes() and tensor.device.type == "cpu"
