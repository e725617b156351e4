import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.errors import SettingError
from kvwatch.gpu import GPUS, Gpu, find_gpu

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("h100-80gb", "NVIDIA H100 80GB HBM3"),
        ("H100 80 GB", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA-H100-80GB-HBM3", "NVIDIA H100 80GB HBM3"),
        ("nvidia-h100-mega-80gb", "NVIDIA H100 80GB HBM3"),
        ("h100-sxm", "NVIDIA H100 80GB HBM3"),
        ("H100 PCIe", "NVIDIA H100 PCIe"),
        ("h100-nvl", "NVIDIA H100 NVL"),
        ("H100-94GB", "NVIDIA H100 NVL"),
        ("B200", "NVIDIA B200"),
        ("GB200", "NVIDIA GB200"),
        ("L4", "NVIDIA L4"),
        ("nvidia-l4", "NVIDIA L4"),
        ("L40", "NVIDIA L40"),
        ("l40s-48gb", "NVIDIA L40S"),
        ("A100-40GB", "NVIDIA A100-SXM4-40GB"),
        ("a100_80gb", "NVIDIA A100-SXM4-80GB"),
        ("A100 80G PCIe", "NVIDIA A100 80GB PCIe"),
        ("A10", "NVIDIA A10"),
        ("a10g", "NVIDIA A10G"),
        ("nvidia-tesla-t4", "Tesla T4"),
        ("v100-32gb", "Tesla V100-SXM2-32GB"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("rtx a6000", "NVIDIA RTX A6000"),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("DGX Spark", "NVIDIA GB10"),
        ("mi300x", "AMD Instinct MI300X"),
        ("GH200", "NVIDIA GH200 480GB"),
    ],
)
def test_what_people_type_finds_the_card(text: str, name: str) -> None:
    assert find_gpu(text).name == name


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_card_is_found_by_the_drivers_name_and_by_its_node_label(gpu: Gpu) -> None:
    assert find_gpu(gpu.name) == gpu
    assert find_gpu(gpu.name.replace(" ", "-")) == gpu


@given(st.sampled_from(GPUS), st.data())
def test_case_and_separators_do_not_matter(gpu: Gpu, data: st.DataObject) -> None:
    separator = data.draw(st.sampled_from(["-", "_", " ", "  ", "/"]))
    case = data.draw(st.sampled_from([str.lower, str.upper, str.title]))
    assert find_gpu(case(gpu.name.replace(" ", separator))) == gpu


def test_an_ambiguous_name_lists_its_cards_with_their_memory() -> None:
    with pytest.raises(SettingError) as raised:
        find_gpu("A100")
    assert str(raised.value) == (
        "--gpu 'A100' can mean NVIDIA A100-SXM4-80GB (79.3 GiB), NVIDIA A100 80GB PCIe (79.1 GiB), "
        "NVIDIA A100-SXM4-40GB (39.4 GiB), NVIDIA A100-PCIE-40GB (39.4 GiB); the KV cache depends on which. "
        "Give one of these names, or --gpu-memory-gib."
    )


def test_rtx_6000_is_ambiguous_between_its_two_generations() -> None:
    with pytest.raises(SettingError, match=r"RTX 6000 Ada Generation.*RTX PRO 6000"):
        find_gpu("RTX 6000")


def test_an_unknown_card_names_close_ones_the_flag_and_the_known_ones() -> None:
    with pytest.raises(SettingError) as raised:
        find_gpu("MI300")
    text = str(raised.value)
    assert text.startswith("--gpu 'MI300' is not a GPU kvwatch knows. Close to it: AMD Instinct MI300X.")
    assert "--gpu-memory-gib" in text
    assert all(gpu.name in text for gpu in GPUS)


@pytest.mark.parametrize("text", ["", "nvidia", "TPU v5", "H100 96TB", "H100 16gb"])
def test_what_names_no_card_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="is not a GPU kvwatch knows"):
        find_gpu(text)


def test_a_mig_slice_is_refused_because_it_has_a_part_of_the_memory() -> None:
    with pytest.raises(SettingError, match=r"MIG slice.*--gpu-memory-gib"):
        find_gpu("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb")


def test_memory_is_cudas_figure_and_not_the_boxs() -> None:
    assert find_gpu("H100").memory_bytes == 85028896768
    assert round(find_gpu("H100").memory_bytes / GIB, 2) == 79.19
    assert round(find_gpu("H200").memory_bytes / GIB, 2) == 139.80
    assert round(find_gpu("B200").memory_bytes / GIB, 2) == 178.36
    assert all(gpu.source.startswith(("torch", "CUDA deviceQuery")) for gpu in GPUS)


def test_every_card_has_its_own_name() -> None:
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
