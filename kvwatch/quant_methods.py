"""Which --quantization vLLM takes for which checkpoint.

Source: vLLM 0.32.0, vllm/config/model.py (_verify_quantization), override_quantization_method of
vllm/model_executor/layers/quantization/*.py and get_quant_config of vllm/model_executor/model_loader/weight_utils.py;
for each pair of checkpoint and flag in the tests, vLLM's own answer.
"""

from kvwatch.errors import SettingError

# These read weights, and what describes them, that were quantised beforehand.
_QUANTISED_BEFOREHAND = """
    aqlm auto-round auto_awq auto_gptq awq awq_marlin bitblas compressed-tensors fbgemm_fp8 fp_quant gptq gptq_bitblas
    gptq_marlin gptq_marlin_24 hqq marlin modelopt modelopt_fp4 modelopt_mixed modelopt_mxfp8 moe_wna16 qqq quark
"""
_READ_FROM_CHECKPOINT = frozenset(_QUANTISED_BEFOREHAND.split())
# The kernels that earlier and later versions have for one format.
_KERNELS = {
    "awq": frozenset({"auto_awq", "awq_marlin", "marlin", "moe_wna16", "ipex"}),
    "gptq": frozenset(
        {"auto_gptq", "gptq_marlin", "gptq_marlin_24", "gptq_bitblas", "bitblas", "marlin", "moe_wna16", "ipex"}
    ),
}
_FOR_ANY_CHECKPOINT = "humming"
# Checkpoints whose own method vLLM takes whatever the flag says.
_SETTLED_BY_CHECKPOINT = ("modelopt", "auto-round", "inc", "mxfp4")


def check_quantization(flag: str | None, checkpoint: str | None, *, model_name: str) -> None:
    """Raises SettingError for a --quantization that vLLM refuses. `checkpoint` is the quant_method of the config.json,
    None where it is not quantised.
    """
    if flag is None:
        return
    given = flag.lower()
    if checkpoint is None:
        if given in _READ_FROM_CHECKPOINT:
            raise SettingError(
                f"--quantization {flag} reads weights that were quantised beforehand, but the config.json of "
                f"{model_name} has no quantization_config; vLLM would refuse to start. Give the {flag} checkpoint as "
                "--model, or a method that quantises while loading: fp8, bitsandbytes."
            )
        return
    if checkpoint.startswith(_SETTLED_BY_CHECKPOINT) or given in {checkpoint, _FOR_ANY_CHECKPOINT}:
        return
    if given not in _KERNELS.get(checkpoint, ()):
        raise SettingError(
            f"--quantization {flag} does not match the checkpoint: the config.json of {model_name} says quant_method "
            f"{checkpoint}; vLLM would refuse to start. Leave --quantization out: vLLM reads the method from there."
        )
