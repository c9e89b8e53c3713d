"""Files that are not what they should be: refused by name, all faults together."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import k3jax
from k3jax.checkpoint.convert import convert_hf
from k3jax.checkpoint.errors import CheckpointError
from k3jax.checkpoint.folder import INDEX
from k3jax.checkpoint.headers import encode_header, read_header
from k3jax.checkpoint.names import placements
from k3jax.checkpoint.verify import verify_hf
from tests.golden_cases import golden_case
from tests.released_files import copy_checkpoint, random_tensors, write_checkpoint
from tests.small_configs import pattern_config, two_layers

SCALE = "layers.3.block_sparse_moe.experts.5.w2.weight_scale"
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


@pytest.fixture
def packed(tmp_path):
    return copy_checkpoint("mxfp4", tmp_path / "packed")


def edit(file, change):
    """Rewrite a safetensors file with `change(tensors)`."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def write_raw(file, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(*offsets, dtype="F32", shape=(1,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BAD_FILES = {
    "empty": (b"", "0 bytes cannot hold a header"),
    "length beyond the file": (b"\xff" * 20, "cannot hold a header of"),
    "not json": (b"{", "Expecting property name"),
    "not an object": ([1], "not a JSON object"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, "the entry of a is not"),
    "negative shape": ({"a": entry(0, 4, shape=(-1,))}, r"a has shape \[-1\]"),
    "unknown type": ({"a": entry(0, 4, dtype="F3")}, "a has the unknown dtype 'F3'"),
    "wrong size": ({"a": entry(0, 8)}, r"a F32 \[1\] needs 4 bytes"),
    "gap": ({"a": entry(0, 4), "b": entry(8, 12)}, "data of b begins at byte 8, not at 4"),
    "overlap": ({"a": entry(0, 4), "b": entry(0, 4)}, "begins at byte 0, not at 4"),
    "truncated": ({"a": entry(0, 4), "b": entry(4, 8), "c": entry(8, 12)}, "truncated: "),
    "too long": ({"a": entry(0, 4)}, "too long: "),
    "a name twice": (
        b'{"a": ' + json.dumps(entry(0, 4)).encode() + b', "a": {}}',
        "'a' stands twice",
    ),
    "type in a list": ({"a": entry(0, 4, dtype=["F32"])}, r"a has dtype \['F32'\]"),
    "type in an object": ({"a": entry(0, 4, dtype={})}, r"a has dtype \{\}"),
    "shape in an object": (
        {"a": {"dtype": "F32", "shape": {}, "data_offsets": [0, 4]}},
        r"shape \{\}",
    ),
    "half a character": ({"\ud800": entry(0, 4)}, r"'\\ud800' holds half a character"),
    "UTF-16": (json.dumps({"a": entry(0, 8, shape=(2,))}).encode("utf-16"), "utf-8"),
    "byte order mark": (b"\xef\xbb\xbf{}", "BOM"),
    "NaN": (b'{"__metadata__": {"format": NaN}}', "NaN is not JSON"),
    "metadata of numbers": (b'{"__metadata__": {"format": 1}}', "not an object of texts"),
    "nested without end": (b"[" * 100_000, "not a readable"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_broken_header_is_refused_with_its_file(name, tmp_path):
    header, message = BAD_FILES[name]
    file = tmp_path / "model.safetensors"
    if name in ("empty", "length beyond the file"):
        file.write_bytes(header)
    else:
        write_raw(file, header, bytes(8))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file)
    assert f"{file}: not a readable safetensors file" in str(caught.value)


def test_header_that_we_write_is_read_by_the_library(tmp_path):
    file = tmp_path / "x.safetensors"
    header = encode_header([("b", "F32", (2, 1)), ("a", "U8", (3,))])
    assert len(header) % 8 == 0
    file.write_bytes(header + np.float32([1, 2]).tobytes() + bytes([1, 2, 3]))
    loaded = load_file(file)
    assert loaded["a"].tolist() == [1, 2, 3] and loaded["b"].tolist() == [[1], [2]]
    assert [t.offset for t in read_header(file).values()] == [len(header), len(header) + 8]


def test_scale_byte_of_nan_is_refused_with_its_tensor_and_other_faults(packed):
    def change(tensors):
        tensors[f"language_model.model.{SCALE}"][1, 0] = 255
        del tensors["language_model.model.norm.weight"]

    edit(packed / SECOND, change)
    with pytest.raises(CheckpointError) as caught:
        k3jax.load_hf(packed)
    message = str(caught.value)
    assert "2 tensors do not fit" in message
    assert f"value: model.{SCALE}: 1 scale bytes are 255" in message and "row 1" in message
    assert "missing: model.norm.weight is not in model-00002" in message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (np.zeros((32, 1), np.float32), "weight_scale is F32, expected U8"),
        (np.zeros((32, 2), np.uint8), r"weight_scale is \[32, 2\], expected \[32, 1\]"),
    ],
)
def test_scales_of_another_type_or_shape_are_refused(packed, changed, message):
    edit(packed / SECOND, lambda t: t.update({f"language_model.model.{SCALE}": changed}))
    with pytest.raises(CheckpointError, match=message):
        k3jax.load_hf(packed)


def test_experts_partly_packed_are_refused(packed):
    stem = f"language_model.model.{SCALE}".removesuffix("_scale")

    def change(tensors):
        del tensors[f"{stem}_scale"], tensors[f"{stem}_packed"]
        tensors[stem] = np.zeros((32, 32), np.float32)

    edit(packed / SECOND, change)
    (packed / INDEX).unlink()
    with pytest.raises(CheckpointError) as caught:
        k3jax.load_hf(packed)
    for part in ("w2.weight_packed", "w2.weight_scale", "(the other experts are packed)"):
        assert part in str(caught.value)


def test_another_quantisation_is_refused(packed):
    config = json.loads((packed / "config.json").read_text())
    described = config["text_config"]["quantization_config"]
    described["format"] = "pack-quantized"
    described["config_groups"]["group_0"]["weights"]["group_size"] = 64
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        k3jax.load_hf(packed)
    assert "format='pack-quantized'" in str(caught.value)
    assert "group_size=64; packed experts must have 32" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {}}',
    ],
)
def test_index_that_is_not_one_is_refused(packed, text):
    (packed / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        k3jax.load_hf(packed)


@pytest.mark.parametrize("name", ["x" * 300, "", "..", "\ud800", "a\0b"])
def test_index_with_an_impossible_file_name_is_refused(packed, name):
    (packed / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"not a safetensors index .*a is not put into"):
        k3jax.load_hf(packed)


def test_blank_tensor_names_are_named(packed):
    edit(packed / SECOND, lambda t: t.update({"": np.zeros(1), " ": np.zeros(1)}))
    with pytest.raises(CheckpointError, match="unknown: ''") as caught:
        k3jax.load_hf(packed)
    assert "unknown: ' '" in str(caught.value)


@pytest.mark.parametrize("width", ["moe_latent_dim", "moe_expert_hidden_dim"])
def test_packed_experts_with_a_part_of_a_group_are_one_fault(tmp_path, width):
    sizes = {"moe_latent_dim": 32, "moe_expert_hidden_dim": 32} | {width: 48}
    cfg = pattern_config("KM", block=1, **sizes)
    tensors = {
        p.released: np.zeros(p.shape, np.uint8 if p.dtype == "U8" else np.float32)
        for p in placements(cfg, packed=True)
    }
    folder = write_checkpoint(tmp_path / "a", cfg, tensors)
    (fault,) = verify_hf(folder).faults
    assert "input width of 48" in fault and "no multiple of 32" in fault
    for experts in ("auto", "dequantized"):
        with pytest.raises(CheckpointError, match="input width of 48"):
            k3jax.load_hf(folder, experts=experts)
        with pytest.raises(CheckpointError, match="input width of 48"):
            convert_hf(folder, tmp_path / "b", experts=experts)


def test_all_unreadable_files_are_named(packed):
    for name in (FIRST, SECOND):
        (packed / name).write_bytes((packed / name).read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        k3jax.load_hf(packed)
    assert FIRST in str(caught.value) and SECOND in str(caught.value)


def test_stray_copy_in_another_file_is_not_read(packed):
    """The index decides where a tensor is."""
    name = "language_model.model.norm.weight"
    stray = load_file(packed / SECOND)[name] * 0
    edit(packed / FIRST, lambda tensors: tensors.update({name: stray}))
    expected = k3jax.load_hf(golden_case("mxfp4").checkpoint)
    np.testing.assert_array_equal(
        k3jax.load_hf(packed).language.norm.weight[...], expected.language.norm.weight[...]
    )


def test_text_checkpoint_of_a_vision_configuration_is_a_text_model(tmp_path):
    source = copy_checkpoint("vision_small", tmp_path / "source")
    is_vision = lambda name: name.startswith(("vision_tower", "mm_projector"))  # noqa: E731
    file = source / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if not is_vision(n)}
    save_file(tensors, file)
    with pytest.warns(UserWarning, match="loading the text model alone"):
        model = k3jax.load_hf(source)
    assert model.cfg.vision is None
    k3jax.save_hf(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "vision_config" not in config
    assert k3jax.load_hf(tmp_path / "saved").cfg.vision is None
    # One tensor of the tower is enough to say that it should be there.
    save_file(tensors | {"mm_projector.post_norm.weight": np.ones(64, np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"missing: vision_tower\.patch_embed"):
        k3jax.load_hf(source)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"experts": "mxfp4"}, "experts='mxfp4' must be one of"), ({"dtype": "int8"}, "dtype=int8")],
)
def test_unknown_choices_are_refused(options, message):
    with pytest.raises(k3jax.errors.UserError, match=message):
        k3jax.load_hf(golden_case("mxfp4").checkpoint, **options)


def test_experts_of_an_odd_width_cannot_be_packed(tmp_path):
    folder = write_checkpoint(tmp_path / "a", two_layers(), random_tensors(two_layers()))
    with pytest.raises(k3jax.errors.UserError, match=r"input width of 12, which is no multiple"):
        k3jax.load_hf(folder, experts="packed")
