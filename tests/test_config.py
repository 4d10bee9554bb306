from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint_files import FLASH, TINY, ling_config
from hypothesis import given
from hypothesis import strategies as st
from schema_sizes import kv_elements_of

from lowtide.config import Blocks, Causal, DecodingDefaults, format_size, parse_size
from lowtide.errors import ConfigError, LowtideError, UnsupportedError, UsageError
from lowtide.families import families, read_config, read_config_in, supported_architectures

GOLDENS = Path(__file__).parent / "goldens"


def write_config(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_published_mini_config() -> None:
    config = read_config(ling_config())
    assert (config.family, config.architecture) == ("llada2", "LLaDA2MoeModelLM")
    assert (config.num_layers, config.num_moe_layers, config.moe_layers[0]) == (20, 19, 1)
    assert config.moe_shape == (19, 256, 8, 2048, 512)
    assert config.moe.elements(config.hidden_size) * 2 == 6 << 20
    assert kv_elements_of(config) * 2 == 40_960
    assert (config.attention.query_size, config.attention.kv_size) == (2048, 512)
    assert config.attention.has_qk_norm  # absent from the published file
    assert config.decoding.mask_token_id == 156895  # so are these two
    assert config.eos_token_ids == (156892,)
    assert config.pad_token_id == 156892
    assert config.attention.rope.rotary_dim == 64
    assert config.moe.shared_size == 512
    assert config.decoding == Blocks(156895, defaults=DecodingDefaults(32, 32, 0.95, None, 16))


def test_golden_configs() -> None:
    config = read_config_in(GOLDENS / "llada2-a")
    assert config.decoding.mask_token_id == 383
    assert (config.eos_token_ids, config.dtype) == ((380,), "float32")
    assert (config.moe.num_groups, config.moe.num_groups_per_token) == (4, 2)
    assert read_config_in(GOLDENS / "llada2-b-bf16").dtype == "bfloat16"


def test_autoregressive_ling_has_its_own_ids() -> None:
    config = read_config(
        ling_config(architectures=["BailingMoeV2ForCausalLM"], model_type="bailing_moe"),
        generation={"eos_token_id": [156892, 156895]},
    )
    assert config.family == "bailing_moe_v2"
    assert config.eos_token_ids == (156892, 156895)
    assert config.decoding == Causal() and config.decoding.block_length == 1


def test_block_routing_replaces_group_limits() -> None:
    config = read_config(ling_config(**FLASH, expert_capacity=48, block_size=32))
    assert (config.moe.capacity, config.moe.window_tokens) == (48, 32)
    assert config.decoding.block_length == 32
    assert (config.moe.num_groups, config.moe.num_groups_per_token) == (1, 1)


def test_nested_rope_and_new_dtype_key() -> None:
    rope = {"rope_theta": 3e6, "rope_type": "default", "partial_rotary_factor": 0.5}
    config = read_config(
        ling_config(
            rope_theta=None,
            partial_rotary_factor=None,
            rotary_dim=None,
            rope_parameters=rope,
            torch_dtype=None,
            dtype="float16",
        )
    )
    rope = config.attention.rope
    assert (rope.theta, rope.rotary_dim, config.dtype) == (3e6, 64, "float16")


def test_optional_keys_have_the_published_meaning() -> None:
    config = read_config(
        ling_config(
            head_dim=None,
            num_key_value_heads=None,
            rotary_dim=None,
            partial_rotary_factor=None,
            num_shared_experts=None,
            torch_dtype=None,
        )
    )
    attention = config.attention
    assert (attention.head_dim, attention.num_kv_heads) == (128, 16)
    assert attention.rope.rotary_dim == 128
    assert (config.moe.shared_size, config.dtype) == (0, "bfloat16")


@pytest.mark.parametrize("name", ["n_routed_experts", "num_local_experts"])
def test_other_names_of_the_expert_count(name: str) -> None:
    config = read_config(ling_config(num_experts=None, **{name: 256}))
    assert config.moe.num_experts == 256
    with pytest.raises(ConfigError, match="contradicts"):
        read_config(ling_config(**{name: 128}))


def test_other_name_of_the_expert_width() -> None:
    config = ling_config(moe_intermediate_size=None, expert_intermediate_size=512)
    assert read_config(config).moe.expert_size == 512


def test_eos_ids_of_the_generation_config_have_the_last_word() -> None:
    def ids(eos: object, generated: object, **overrides: object) -> tuple[int, ...]:
        config = read_config(
            ling_config(eos_token_id=eos),
            generation={"eos_token_id": generated},
            overrides=overrides,
        )
        return config.eos_token_ids

    assert ids(5, None) == (5,)
    assert ids(5, [6, 7, 6]) == (6, 7)
    assert ids(5, []) == (5,)
    assert ids(5, 6) == (6,)
    assert ids(None, 6) == (6,)
    assert ids([3, 4], 6) == (6,)
    assert ids([3, 4], None) == (3, 4)
    assert ids(5, [6, 7], eos_token_id=8) == (8,)
    assert ids(5, [6, 7], eos_token_id=[8, 9]) == (8, 9)


def test_eos_ids_outside_the_vocabulary_never_end_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some tiny models on the hub have kept the ids of the large one."""

    def ids(eos: object, generated: object = None) -> tuple[int, ...]:
        config = ling_config(**TINY, eos_token_id=eos)
        return read_config(config, generation={"eos_token_id": generated}).eos_token_ids

    assert ids([15, 16, 151645]) == (15,)
    assert ids([15, 16, 151645]) == (15,)
    message = "eos_token_id 16, 151645 is outside the vocabulary of 16 and ignored."
    assert caplog.messages == [message]  # once
    assert ids(3, 100001) == ()
    assert "100001 is outside" in caplog.messages[1]
    assert "answers end by length" in caplog.messages[1]
    assert len(caplog.messages) == 2 and {r.levelname for r in caplog.records} == {"WARNING"}
    with pytest.raises(ConfigError, match="eos_token_id -1 is not a token id"):
        ids(-1)


def test_small_vocabularies_do_not_inherit_published_ids() -> None:
    config = read_config(ling_config(**TINY))
    assert config.eos_token_ids == ()
    with pytest.raises(ConfigError, match=r"156895 .* 16.*mask_token_id"):
        read_config(ling_config(**{**TINY, "mask_token_id": None}))


def test_overrides_replace_keys_and_must_have_an_effect(tmp_path: Path) -> None:
    folder = write_config(tmp_path, ling_config())
    config = read_config_in(folder, {"mask_token_id": 7, "block_length": 8})
    assert (config.decoding.mask_token_id, config.decoding.block_length) == (7, 8)
    assert config.decoding == Blocks(7, defaults=DecodingDefaults(block_length=8))
    with pytest.raises(UsageError, match="'mask_tokn_id'.*Did you mean mask_token_id"):
        read_config_in(folder, {"mask_tokn_id": 7})
    with pytest.raises(UsageError, match="model_type"):
        read_config_in(folder, {"model_type": "x"})
    with pytest.raises(ConfigError, match="mask_token_id 157184"):
        read_config_in(folder, {"mask_token_id": 157184})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "names no architecture.*LLaDA2MoeModelLM"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": ["FooLM"]}, "'FooLM' is not supported.*BailingMoeV2ForCausalLM"),
        ({"num_experts_per_tok": 257}, "257 experts per token, but there are 256"),
        ({"num_experts_per_tok": 200}, "200 experts per token, but 4 groups hold only 128"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok 0 must be an integer from 1"),
        ({"n_group": 7}, "256 experts do not divide into 7 groups"),
        ({"n_group": 256}, "groups of one expert"),
        ({"topk_group": 9}, "9 groups per token, but there are 8"),
        ({"n_group": None, "topk_group": None}, "no n_group"),
        ({"num_experts": 0}, "num_experts 0"),
        ({"num_experts": 2**20}, "num_experts 1048576"),
        ({"hidden_size": -1}, "hidden_size -1"),
        ({"hidden_size": True}, "hidden_size True"),
        ({"hidden_size": 2048.0}, "hidden_size 2048.0"),
        ({"hidden_size": "2048"}, "hidden_size '2048'"),
        ({"hidden_size": 10**400}, "hidden_size an integer of 1329 bits"),
        ({"hidden_size": 1000, "head_dim": None}, "1000 does not divide by 16"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers 1000000000000"),
        ({"num_hidden_layers": [20]}, "num_hidden_layers a list of 1 values"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"first_k_dense_replace": 20}, "20 dense layers of 20"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace -1"),
        ({"num_key_value_heads": 3}, "16 attention heads do not divide among 3"),
        ({"num_key_value_heads": 32}, "do not divide"),
        ({"rotary_dim": 63, "partial_rotary_factor": None}, "63 rotating dimensions must be even"),
        ({"rotary_dim": 130, "partial_rotary_factor": None}, "130 rotating .* head's 128"),
        ({"rotary_dim": 32}, "twice: 32 and 64"),
        ({"partial_rotary_factor": 1.5, "rotary_dim": None}, "partial_rotary_factor 1.5"),
        ({"rope_theta": float("nan")}, "rope_theta nan"),
        ({"rope_theta": float("inf")}, "rope_theta inf"),
        ({"rope_theta": 10**400}, "rope_theta an integer of 1329 bits"),
        ({"rope_theta": None}, "no rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta twice"),
        ({"rope_parameters": 3}, "rope_parameters 3 must be an object"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps True"),
        ({"routed_scaling_factor": -2.5}, "routed_scaling_factor -2.5"),
        ({"routed_scaling_factor": None}, "no routed_scaling_factor"),
        ({"norm_topk_prob": 1}, "norm_topk_prob 1 must be true or false"),
        ({"torch_dtype": 16}, "torch_dtype 16 must be a text"),
        ({"dtype": "float32"}, "contradicts torch_dtype"),
        ({"eos_token_id": "5"}, "eos_token_id '5'"),
        ({"eos_token_id": [True]}, "eos_token_id True"),
        ({"pad_token_id": -1}, "pad_token_id -1"),
        ({"expert_capacity": 4}, "expert_capacity 4"),
        ({"expert_capacity": 48, "block_length": 40}, "block of 40 .* block_size 32"),
        (
            {"num_hidden_layers": 1024, "num_experts": 4096, "moe_intermediate_size": 2**20},
            "more than any model",
        ),
    ],
)
def test_refused_with_numbers(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(ling_config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' .* only 'silu'"),
        ({"score_function": "softmax"}, "score_function 'softmax'"),
        ({"use_bias": True}, "use_bias True"),
        ({"use_qkv_bias": True}, "use_qkv_bias True"),
        ({"norm_head": True}, "norm_head True"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"use_rmsnorm": False}, "use_rmsnorm False"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            "rope_scaling: .* 'yarn' .* only 'default'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: .* 'linear'"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.'full_attention'"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'.*bfloat16"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_unsupported_features_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_config(ling_config(**changes))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json is missing"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "a JSON object, not a list"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' * 200_000, "nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"vocab_size": 1, "vocab_size": 2}', "'vocab_size' occurs twice"),
        (b" " * (16 * 2**20 + 1), "16777217 bytes; at most 16777216"),
    ],
    ids=range(9),
)
def test_broken_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as told:
        read_config_in(tmp_path)
    assert "sys." not in str(told.value)  # Python's advice to a programmer


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        read_config_in(tmp_path / "nowhere")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        read_config_in(tmp_path)


def test_broken_generation_config_is_named(tmp_path: Path) -> None:
    folder = write_config(tmp_path, ling_config())
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match="generation_config.json: eos_token_id 'x'"):
        read_config_in(folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="generation_config.json is not valid"):
        read_config_in(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(ling_config()) + ["eos_token_id"]), JSON))
def test_any_value_gives_a_config_or_a_typed_error(changes: dict[str, object]) -> None:
    try:
        config = read_config({**ling_config(), **changes})
    except LowtideError:
        return
    assert config.moe.num_experts_per_token <= config.moe.num_experts


LONG: dict[str, object] = {
    "numbers": [*range(1, 20_000)],
    "texts": [f"x{i}" for i in range(20_000)],
    "objects": {f"x{i}": {"format": f"f{i}", "weights": {}} for i in range(20_000)},
    "text": "x" * 200_000,
    "integer": 1 << 60_000,
}
ROUNDED = {
    "fp8": ("fmt", "weight_block_size"),
    "gptq": ("bits", "group_size", "checkpoint_format"),
    "awq": ("bits", "group_size", "version"),
    "compressed-tensors": ("format", "config_groups"),
    "modelopt": ("quant_algo",),
}


@pytest.mark.parametrize("kind", LONG)
def test_however_long_a_value_is_what_is_said_of_it_is_short(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    usual = {"fp8": {"weight_block_size": [128, 128]}}
    changes: list[dict[str, object]] = [{key: LONG[kind]} for key in ling_config()]
    changes += [{key: LONG[kind]} for key in ("eos_token_id", "quantization_config")]
    for method, keys in ROUNDED.items():
        base = {"quant_method": method, "bits": 4, "group_size": 128, **usual.get(method, {})}
        changes += [{"quantization_config": {**base, key: LONG[kind]}} for key in keys]
    for change in changes:
        try:
            read_config(ling_config(**{**TINY, **change}))
        except LowtideError as error:
            assert len(str(error)) < 2000, change.keys()
    assert all(len(message) < 2000 for message in caplog.messages)


def test_every_architecture_has_a_family() -> None:
    assert supported_architectures() == (
        "BailingMoeV2ForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DreamModel",
        "FusedLLaDAMoEModelLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GptOssForCausalLM",
        "LLaDA2MoeModelLM",
        "LLaDAMoEModel",
        "LLaDAMoEModelLM",
        "LLaDAModelLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "LlamaForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MixtralForCausalLM",
        "OlmoeForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    )
    for name in ("BailingMoeV2ForCausalLM", "LLaDA2MoeModelLM"):
        assert read_config(ling_config(architectures=[name])).family in families()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("0", 0),
        ("10GiB", 10 * 2**30),
        ("10GB", 10**10),
        ("512MiB", 2**29),
        ("1.5GiB", 3 * 2**29),
        (" 1.5 gib ", 3 * 2**29),
        ("0.1KB", 100),
        ("1KiB", 1024),
        ("7B", 7),
        ("80%", 800),
        ("12.5%", 125),
        ("100%", 1000),
        ("12G", 12 * 2**30),
        ("9M", 9 * 2**20),
        ("1.5g", 3 * 2**29),
        ("64 k", 64 * 2**10),
        ("2T", 2 * 2**40),
        ("12884901888", 12 * 2**30),
        (12884901888, 12 * 2**30),
        (0, 0),
    ],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_size(text, total=1000) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "-1", "-5GiB", "1.5", "1e9", "nan", "inf", "nanGiB", "10Gi", "10XB", "1 0"),
        *("12", "999", "0.5", "12.0", "1000.5", "G", "1.5.G", 1, 12, 999),
        *("101%", "-1%", "9" * 30, "9" * 9000, "9999999999PiB", "٣GiB", "0x10", "1_000"),
        *(-1, 2**63, True, 1.5, None, float("nan")),
    ],
)
def test_refused_sizes(text: object) -> None:
    with pytest.raises(UsageError):
        parse_size(text, total=1000)


@pytest.mark.parametrize(
    ("text", "meant"), [("12", "12GiB"), (8, "8GiB"), ("1.5", "1.5GiB"), (" 24 ", "24GiB")]
)
def test_a_bare_number_is_asked_about(text: str | int, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"would be bytes; did you mean {meant}\?.*12G"):
        parse_size(text)


def test_a_size_too_long_to_print() -> None:
    with pytest.raises(UsageError, match="an integer of 16610 bits"):
        parse_size(10**5000)


def test_a_share_needs_a_whole() -> None:
    with pytest.raises(UsageError, match="'80%' needs a whole"):
        parse_size("80%")


def test_format_size() -> None:
    sizes = [0, 512, 1023, 1024, 1536, 2**20 - 1, 2**20, 32_513_000_000, 2**63 - 1]
    assert [format_size(size) for size in sizes] == [
        *("0 B", "512 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB"),
        *("30.3 GiB", "8.0 EiB"),
    ]


@given(st.integers(0, 2**63 - 1))
def test_a_printed_size_reads_back(num_bytes: int) -> None:
    text = format_size(num_bytes)
    if not text.endswith("EiB"):
        assert abs(parse_size(text) - num_bytes) <= max(num_bytes * 0.051, 0)
