"""Weights in 8 bits, for inference on CPU.

    q_gd = round(w_gd / a_g)    with a_g = max_d |w_gd| / 127, one scale per row of the weight, found once
    r_nd = round(x_nd / b_n)    with b_n = max_d |x_nd| / 127, one scale per token, found at each call
    y_ng = a_g * b_n * sum_d r_nd q_gd + bias_g

The sum of integers is exact. A token has its own scale, so its vector does not depend on the rest of its batch.

Shape suffixes: N rows; D width of the input; G width of the output.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from .torch_state import is_right, private, question

logger = logging.get_logger(__name__)


PREPACK, PRODUCT = "ops.onednn.qlinear_prepack", "ops.onednn.qlinear_pointwise"
HAS_VNNI = "cpu._is_vnni_supported"
METHOD = "elmo_int8"  # in `quantization_config` of a saved configuration
LARGEST, ZERO_POINT = 127, 128  # the bytes of inputs are 1 to 255, because oneDNN is slow with signed inputs


def int8_obstacle() -> str | None:
    """The reason why this machine has no fast products in 8 bits, or `None`."""
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no quantized products of oneDNN"
    if not question(HAS_VNNI)():  # without these instructions, oneDNN adds pairs of products in 16 bits, which overflow
        return "this processor has no VNNI instructions"
    return None if _can_multiply() else "this release of torch has no quantized products that are known here"


@cache
def _can_multiply() -> bool:
    return is_right(PRODUCT, _equals_definition)


def _equals_definition() -> bool:
    linear = skip_init(nn.Linear, 8, 5)  # without drawing random numbers
    for tensor in (linear.weight, linear.bias):
        tensor.copy_(torch.linspace(-3, 2, tensor.numel()).view_as(tensor))
    inputs, layer = linear.weight.sin(), Int8Linear.from_linear(linear)
    found = int8_product(inputs, Int8Weight.pack(layer.weight, layer.scales), layer.bias, None)
    return torch.allclose(found, layer(inputs), rtol=1e-5, atol=1e-5)


def int8_rows(weight_GD: Tensor) -> tuple[Tensor, Tensor]:
    """The weight in int8 `(G, D)`, and the scale of each row `(G,)`."""
    scales_G1 = _scales(weight_GD)
    return (weight_GD / scales_G1).round().to(torch.int8), scales_G1.squeeze(1)


def input_bytes(inputs_ND: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs in uint8 `(N, D)`, with `ZERO_POINT` for 0, and the scale of each row `(N, 1)`."""
    scales_N1 = _scales(inputs_ND)
    half_above = torch.tensor(ZERO_POINT + 0.5, device=inputs_ND.device)  # the conversion to integers rounds down
    return torch.addcdiv(half_above, inputs_ND, scales_N1).to(torch.uint8), scales_N1


def _scales(rows: Tensor) -> Tensor:
    tiny = torch.finfo(rows.dtype).tiny  # of rows of zeros
    return rows.abs().amax(-1, keepdim=True).div_(LARGEST).clamp_(min=tiny)


class Int8Linear(nn.Module):
    """`nn.Linear` with a weight in 8 bits, for inference. `forward` is the definition, for every device.

    Attributes:
        weight: `(out_features, in_features)`, int8.
        scales: `(out_features,)`, float32.
        bias: as in `nn.Linear`, float32.
    """

    weight: nn.Parameter  # and no buffer, so that all counts of parameters include it
    scales: Tensor
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear):
        """Room for the weight and the bias of `linear`. `from_linear` also copies them."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(torch.empty_like(linear.weight, dtype=torch.int8), requires_grad=False)
        self.register_buffer("scales", linear.weight.new_empty(self.out_features))
        self.register_parameter("bias", linear.bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "Int8Linear":
        layer = cls(linear)
        layer.weight.data, layer.scales = int8_rows(linear.weight.detach())
        return layer

    def to_linear(self) -> nn.Linear:
        """The layer with a weight in float32, as rounded, without gradient."""
        with torch.device(self.weight.device):
            linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.weight = nn.Parameter(self.weight * self.scales[:, None], requires_grad=False)
        if self.bias is not None:
            linear.bias = self.bias
        return linear

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):  # the sums need float32
            bytes_ND, scales_N1 = input_bytes(inputs.float())
            sums = F.linear(bytes_ND.float() - ZERO_POINT, self.weight.float())
            outputs = sums * scales_N1 * self.scales
        return (outputs if self.bias is None else outputs + self.bias).to(inputs.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def replace_linears(model: nn.Module, old: type[nn.Module], replacement: Callable[[Any], nn.Module]):
    """Replaces all layers of exactly the type `old` inside a model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is old:
                setattr(module, name, replacement(child))


class Int8Weight(NamedTuple):
    """A weight in 8 bits in the layout of oneDNN, with the scales and the zero points of its rows."""

    copy: Tensor
    scales_G: Tensor
    zeros_G: Tensor

    @classmethod
    def pack(cls, weight_GD: Tensor, scales_G: Tensor) -> "Int8Weight":
        copy = private(PREPACK)(weight_GD, None)
        return cls(copy, scales_G, torch.zeros_like(scales_G, dtype=torch.long))


def int8_product(inputs_ND: Tensor, weight: Int8Weight, plus: Tensor | None, clip: float | None) -> Tensor:
    """`Int8Linear.forward`, with an added vector or matrix, or clipped. It has no gradient."""
    if not len(inputs_ND):
        return inputs_ND.new_empty(0, len(weight.scales_G))
    bytes_ND, scales_N1 = input_bytes(inputs_ND)
    inputs = (bytes_ND.contiguous(), 1.0, ZERO_POINT)
    output = (None, 1.0, 0, torch.float32)  # bias; scale, zero point and type of the output
    product_NG = private(PRODUCT)(*inputs, *weight, *output, "none", [], "")
    if plus is None:
        product_NG.mul_(scales_N1)
    else:
        torch.addcmul(plus, product_NG, scales_N1, out=product_NG)
    return product_NG if clip is None else product_NG.clamp_(-clip, clip)


class ELMoInt8Config(QuantizationConfigMixin):
    """`quantization_config` for `from_pretrained`: the linear layers of the biLM in 8 bits. It has no options."""

    def __init__(self, quant_method: str = METHOD):
        self.quant_method = quant_method


class ELMoInt8Quantizer(HfQuantizer):
    """Quantizes a model, or prepares it for weights that were saved in 8 bits.

    It calls methods of the model: transformers may execute this file again for another checkpoint, and then the
    registered quantizer and the model come from different copies.
    """

    is_trainable = is_qat_trainable = True  # else Trainer would not even evaluate; `model.train()` refuses training

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        if dtype not in (None, torch.float32):
            raise ValueError(f"Weights in 8 bits are computed with float32, not with {dtype}; pass dtype='float32'.")
        return torch.float32

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model, **kwargs):
        if self.pre_quantized:
            model._use_int8(filled=False)
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        if not self.pre_quantized:
            model._use_int8(filled=True)
        model._hold_gradients(True)
        if obstacle := int8_obstacle():
            logger.warning(f"8 bits are not fast here, because {obstacle}: the model computes in float32.")
            return self.dequantize(model)
        return model

    def _dequantize(self, model, dtype: Any = None):
        model._use_floats()
        return model.to(dtype) if isinstance(dtype, torch.dtype) else model  # a saved configuration has its name


if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(METHOD)(ELMoInt8Config)
    register_quantizer(METHOD)(ELMoInt8Quantizer)
