import io
import sys

import numpy as np
import pytest
from PIL import Image

from k3jax.errors import UserError
from k3jax.media import MediaConfig, Video, process_media
from k3jax.media.video import choose_frames
from tests.media.drawings import draw

FRAMES = [draw(50, 40, seed=seed) for seed in range(10)]


def test_video_is_chunks_of_four_frames():
    media = process_media([FRAMES[0], Video(frames=FRAMES)], buckets=False)
    assert media.grids.tolist() == [[1, 4, 4], [4, 4, 4], [4, 4, 4], [2, 4, 4]]
    assert media.sizes.tolist() == [[50, 40]] * 4
    assert media.num_features.tolist() == [4] * 4
    images = process_media(FRAMES, buckets=False)
    np.testing.assert_array_equal(media.patches[16:], images.patches)


def test_array_and_mixed_frames_equal_images():
    expected = process_media([Video(frames=FRAMES)]).patches
    np.testing.assert_array_equal(process_media([Video(frames=np.stack(FRAMES))]).patches, expected)
    mixed = [Image.fromarray(FRAMES[0]), *FRAMES[1:]]
    np.testing.assert_array_equal(process_media([Video(frames=mixed)]).patches, expected)


def test_frames_take_the_limit_of_frames_and_one_size():
    config = MediaConfig(in_patch_limit_each_frame=4)
    frames = [draw(56, 56), draw(100, 30)]
    media = process_media([Video(frames=frames)], config=config, buckets=False)
    assert media.grids.tolist() == [[2, 2, 2]] and media.sizes.tolist() == [[56, 56]]


@pytest.mark.parametrize(
    ("num_frames", "fps", "expected"),
    [
        (5, None, [0, 1, 2, 3, 4]),
        (1, 30.0, [0]),
        (6, 4.0, [0, 1, 2, 3, 4, 5]),
        (24, 24.0, [0, 3, 7, 10, 13, 16, 20, 23]),
        (2, 60.0, [0]),
    ],
)
def test_frames_are_taken_at_the_rate(num_frames, fps, expected):
    assert choose_frames(num_frames, fps, 8.0).tolist() == expected


def test_frames_with_a_rate_are_sampled():
    media = process_media([Video(frames=FRAMES, fps=20.0)], buckets=False)
    expected = process_media([FRAMES[i] for i in (0, 3, 6, 9)], buckets=False)
    assert media.grids.tolist() == [[4, 4, 4]]
    np.testing.assert_array_equal(media.patches, expected.patches)


@pytest.mark.parametrize(
    ("video", "words"),
    [
        ({"frames": []}, "item 0 has no frames"),
        ({"frames": np.zeros((0, 4, 4, 3), np.uint8)}, "item 0 has no frames"),
        ({"frames": "clip.mp4"}, "item 0: frames is a str; pass a list of images"),
        ({"frames": 7}, "item 0: frames is a int"),
        ({"frames": [FRAMES[0], b"x"]}, r"item 0, frame 1 \(1 bytes\) is not an image"),
        ({"frames": [FRAMES[0], FRAMES[0][:0]]}, "item 0, frame 1: 50x0 has no pixels"),
        ({}, "either frames or a file"),
        ({"frames": FRAMES, "file": "clip.mp4"}, "either frames or a file"),
        ({"file": "clip.mp4", "fps": 8}, "a file states its own rate"),
        ({"frames": FRAMES, "fps": 0}, "fps=0 must be a positive number"),
    ],
)
def test_bad_video_is_refused(video, words):
    with pytest.raises(UserError, match=words):
        process_media([Video(**video)])


def test_too_long_video_is_refused_before_it_is_read():
    frames = [FRAMES[0], *[b"never opened"] * 99]
    with pytest.raises(UserError, match="100 frames of 16 patches are more than max_video_patches"):
        process_media([Video(frames=frames)], config=MediaConfig(max_video_patches=1599))


def test_missing_decoder_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "av", None)
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"...")
    for item in (Video(file=b"..."), str(clip), "data:video/mp4;base64,AAAA"):
        with pytest.raises(UserError, match=r"pip install 'k3jax\[video\]'"):
            process_media([item])


def clip(av, container: str, num_frames: int = 30, rate: int = 24) -> bytes:
    """Frame i is grey of about 8 i."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 56, 28, "yuv420p"
        for i in range(num_frames):
            grey = np.full((28, 56, 3), 8 * i, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_file_is_sampled_at_the_published_rate(container, tmp_path):
    av = pytest.importorskip("av", reason="reading video files needs the extra k3jax[video]")
    data = clip(av, container)
    path = tmp_path / "clip.mp4"
    path.write_bytes(data)
    media = process_media([Video(file=data), path], buckets=False)
    assert media.grids.tolist() == [[4, 2, 4], [4, 2, 4], [2, 2, 4]] * 2
    assert media.sizes.tolist() == [[56, 28]] * 6
    greys = (media.patches.reshape(20, -1).mean(axis=1) + 1) * 127.5
    expected = 8.0 * choose_frames(30, 24.0, 8.0)
    assert np.abs(greys - np.tile(expected, 2)).max() < 4


@pytest.mark.parametrize("data", [b"no video" * 99, b"", b"ffconcat version 1.0\nfile a.mp4\n"])
def test_file_that_is_no_video_is_refused(data):
    pytest.importorskip("av", reason="reading video files needs the extra k3jax[video]")
    with pytest.raises(UserError, match=r"item 0 \(\d+ bytes\) is (not a video|empty)"):
        process_media([Video(file=data)])


def test_truncated_file_is_refused():
    av = pytest.importorskip("av", reason="reading video files needs the extra k3jax[video]")
    data = clip(av, "mp4")
    with pytest.raises(UserError, match="is not a video that can be read"):
        process_media([Video(file=data[: len(data) // 2])])
