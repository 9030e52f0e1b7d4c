"""Images and videos by path: sizes, patches and texts as transformers makes them, and what is refused."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import math
import random
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

import meshwright as mw
from meshwright.data import vision_files
from meshwright.data.processor import ImageLimits, Placeholders, Processor, _at_least, fitted
from meshwright.data.vision_files import Clip, View, clip_of, read_images
from tests import shown

MARKS = Placeholders("<|image_pad|>", "<|video_pad|>", (1, 2))
SIZES = [(16, 24), (7, 9), (9, 7), (100, 300), (31, 33), (40, 8), (64, 64)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shown.source(tmp_path_factory.mktemp("m") / "m")


def processor(directory: Path, root: Path, **wishes: Any) -> Processor:
    return Processor(directory, MARKS, shown.PATCH, ImageLimits(root, **wishes))


def noise(at: Path, height: int, width: int, mode: str = "RGB") -> Path:
    dice = np.random.default_rng(height * width)
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    Image.fromarray(dice.integers(0, 256, (height, width, *channels), dtype=np.uint8), mode).save(at)
    return at


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_patches_are_those_of_transformers(directory: Path, tmp_path: Path, mode: str) -> None:
    reference = Qwen2VLImageProcessorPil.from_pretrained(directory)
    for number, size in enumerate(SIZES):
        file = noise(tmp_path / f"{number}.png", *size, mode)
        view = processor(directory, tmp_path).image(file.name)
        expected = reference(Image.open(file), return_tensors="pt")
        assert list(view.grid) == expected["image_grid_thw"][0].tolist()
        local = (processor(directory, tmp_path).pixels(view).float() - 127.5) / 127.5
        torch.testing.assert_close(local, expected["pixel_values"], rtol=0, atol=3e-7)


def video_size(*args: Any) -> Any:
    """transformers' own, out of a file that cannot be imported without torchvision."""
    tree = ast.parse((Path(transformers.__file__).parent / "models/qwen3_vl/video_processing_qwen3_vl.py").read_text())
    result = next(each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "smart_resize")
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([result], []), "smart_resize", "exec"), names)
    return names["smart_resize"](*args)


def test_sizes_are_those_of_transformers() -> None:
    dice = random.Random(0)
    for _ in range(500):
        height, width, num = dice.randint(4, 3000), dice.randint(4, 3000), dice.randint(2, 60)
        if max(height, width) > 200 * min(height, width):
            continue
        pixels = (65536, 16777216) if num % 2 else (4096, 1 << 18)
        assert fitted(height, width, 32, pixels) == smart_resize(height, width, 32, *pixels)
        height, width = max(height, 32), max(width, 32)
        assert fitted(height, width, 32, pixels, num) == video_size(num, height, width, 2, 32, *pixels)


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "gif", "bmp", "tiff"])
def test_an_image_that_was_cut_off(directory: Path, tmp_path: Path, kind: str) -> None:
    """It is refused by the row that names it, and not by the step that shows it. Bytes after its end are no harm."""
    file, result = noise(tmp_path / f"a.{kind}", 90, 90), processor(directory, tmp_path)
    whole = file.read_bytes()
    result.pixels(result.image(file.name))
    file.write_bytes(whole + bytes(9000))
    result.pixels(result.image(file.name))
    file.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(mw.DataError, match=rf"a\.{kind} cannot be read as an image"):
        result.image(file.name)


@pytest.mark.parametrize(("way", "above"), [(5, 0), (6, 0), (7, 1), (8, 1)])
def test_an_image_is_turned_upright(directory: Path, tmp_path: Path, way: int, above: int) -> None:
    """A camera that was held on its side says so in the file; 5 and 7 are mirrored too."""
    image = Image.new("RGB", (32, 8), "white")
    image.paste((0, 0, 0), (0, 0, 16, 8))
    about = Image.Exif()
    about[0x0112] = way
    image.save(tmp_path / "a.png", exif=about)
    result = processor(directory, tmp_path)
    view = result.image("a.png")
    assert view.grid == (1, 8, 2)
    half = result.pixels(view).view(2, -1)
    assert half[above].float().mean() < 10  # the half that is black, above or below
    assert half[1 - above].float().mean() > 245


def test_a_video_says_its_times(directory: Path) -> None:
    """The times are of the file's own frames, not of those that are taken."""
    view = View(("a",), (2, 4, 4), 1, "", (0, 7, 20), 10.0)
    assert view.times == pytest.approx(Qwen3VLProcessor._calculate_timestamps(None, [0, 7, 20], 10.0))
    run = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
    assert processor(directory, Path()).text_of(view) == f"<0.3 seconds>{run}<2.0 seconds>{run}"
    assert View.of(str(view)) == view


def moving(at: Path, num: int) -> list[Image.Image]:
    """Ever brighter."""
    return [Image.new("RGB", (32, 16), (each * 255 // num,) * 3) for each in range(num)]


def as_gif(at: Path, num: int, fps: int) -> Path:
    first, *others = moving(at, num)
    first.save(at, save_all=True, append_images=others, duration=1000 // fps, loop=0)
    return at


def as_mp4(at: Path, num: int, fps: int) -> Path:
    with av.open(str(at), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for image in moving(at, num):
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return at


@pytest.mark.parametrize("kind", ["gif", "mp4"])
def test_frames_of_a_video_are_taken_evenly(directory: Path, tmp_path: Path, kind: str) -> None:
    file = {"gif": as_gif, "mp4": as_mp4}[kind](tmp_path / f"a.{kind}", 30, 10)
    result = processor(directory, tmp_path)
    view = result.video(file.name, None)
    assert view.fps == pytest.approx(10)
    assert view.taken == (0, 6, 12, 17, 23, 29)  # 2 a second of 3 seconds
    assert view.grid[0] == 3
    brightness = result.pixels(view).view(3, -1, 3, 2, 16).float().mean((1, 2, 4)).flatten()
    expected = torch.tensor([each * 255 // 30 for each in view.taken]).float()
    torch.testing.assert_close(brightness, expected, rtol=0, atol=8.0)  # both kinds lose a little
    assert processor(directory, tmp_path, fps=5.0).video(file.name, None).grid[0] == 8  # 15, the last shown twice


def test_a_video_as_images(directory: Path, tmp_path: Path) -> None:
    names = [shown.drawn(tmp_path / f"{at}.png", colour).name for at, colour in enumerate(("red", "green", "blue"))]
    result = processor(directory, tmp_path)
    view = result.video(names, 4.0)
    assert view.grid[0] == 2
    assert view.times == [0.125, 0.5]
    rows = result.pixels(view).view(2, -1, 3, 2, 16)
    assert torch.equal(rows[1, :, :, 0], rows[1, :, :, 1])  # the last is shown twice


def naming(at: Path) -> Path:
    """A file that names another one, which FFmpeg would open."""
    as_mp4(at.parent / "clip.mp4", 8, 4)
    playlist = "#EXTM3U\n#EXTINF:2,\nclip.mp4\n#EXT-X-ENDLIST\n"
    at.write_text({".mp4": "ffconcat version 1.0\nfile clip.mp4\n", ".m3u8": playlist}[at.suffix])
    return at


REFUSED = {
    "no file": (lambda p, at: p.image("none.png"), "there is no file"),
    "an address": (lambda p, at: p.image("https://example.com/a.png"), "not a local path"),
    "no image": (lambda p, at: p.image("a.txt"), "cannot be read as an image"),
    "no video": (lambda p, at: p.video("a.txt", None), "cannot be read as a video"),
    "a playlist": (lambda p, at: p.video(naming(at / "a.m3u8").name, None), r"a\.m3u8 cannot be .*MP4, MOV, .*MPEG"),
    "a list of files": (lambda p, at: p.video(naming(at / "b.mp4").name, None), r"b\.mp4 cannot be .*MP4, MOV, "),
    "too oblong": (lambda p, at: p.image(noise(at / "long.png", 1, 300).name), "aspect ratio above 200"),
    "no fps": (lambda p, at: p.video(["b.png", "b.png"], None), '"fps"'),
    "one image": (lambda p, at: p.video(["b.png"], 2.0), "give two or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(directory: Path, tmp_path: Path, case: str) -> None:
    (tmp_path / "a.txt").write_text("words")
    noise(tmp_path / "b.png", 8, 8)
    act, what = REFUSED[case]
    with pytest.raises(mw.DataError, match=what):
        act(processor(directory, tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"image_mean": [0.48, 0.46, 0.41]}, "image_mean"),
        ({"merge_size": 1}, "merge_size=1 is"), ({"temporal_patch_size": 1}, "temporal_patch_size=1"),
        ({"image_std": [1.0] * 3}, "image_std"), ({"do_resize": False}, "do_resize=False"),
        ({"do_rescale": False}, "do_rescale=False"), ({"do_normalize": False}, "do_normalize=False"),
        ({"resample": 2}, "resample=2"), ({"patch_size": 16}, "the vision tower has 4"),
        ({"size": {"shortest_edge": 0, "longest_edge": 64}}, "shortest_edge"),
        ({"size": {"shortest_edge": 64}}, "longest_edge"),
        (None, "has no preprocessor_config.json"),
    ],
    ids=str,
)  # fmt: skip
def test_another_processor(tmp_path: Path, change: dict[str, Any] | None, what: str) -> None:
    noise(tmp_path / "b.png", 8, 8)
    if change is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**shown.IMAGE_SETTINGS, **change}))
    with pytest.raises(mw.DataError, match=what):
        processor(tmp_path, tmp_path).image("b.png")


def test_a_file_of_both_processors(tmp_path: Path) -> None:
    """transformers writes this file now."""
    of_videos = {**shown.IMAGE_SETTINGS, "size": {"shortest_edge": 32, "longest_edge": 128}}
    both = {"image_processor": shown.IMAGE_SETTINGS, "video_processor": of_videos}
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    noise(tmp_path / "b.png", 8, 8)
    made = processor(tmp_path, tmp_path)
    assert made.image("b.png").grid == (1, 2, 2)
    assert made._of("video")["size"] == of_videos["size"]


def test_an_image_that_has_changed(directory: Path, tmp_path: Path) -> None:
    file, result = noise(tmp_path / "b.png", 8, 8), processor(directory, tmp_path)
    view = result.image("b.png")
    noise(file, 16, 16)
    with pytest.raises(mw.DataError, match=r"had .* bytes when the data were read"):
        result.pixels(view)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_black_on_nothing_is_black_on_white(directory: Path, tmp_path: Path, mode: str) -> None:
    """Processors and servers show white, not black on black."""
    clear = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (16, 16, 32, 48))
    clear.convert(mode).save(tmp_path / "a.png")
    pixels = processor(directory, tmp_path).pixels(processor(directory, tmp_path).image("a.png")).float()
    assert 200 < pixels.mean() < 250


def test_names_that_no_file_can_have(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(mw.DataError, match="not a valid path"):
        processor(directory, tmp_path).image("a" * 5000)


def test_a_damaged_clip(directory: Path, tmp_path: Path) -> None:
    images = [Image.new("RGB", (64, 64), (n * 40, 0, 0)) for n in range(4)]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:], duration=100)
    whole = (tmp_path / "a.gif").read_bytes()
    for stop in range(10, len(whole), 7):
        (tmp_path / "b.gif").write_bytes(whole[:stop])
        try:
            seen = processor(directory, tmp_path)
            seen.pixels(seen.video("b.gif", None))
        except mw.DataError:
            continue


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.apng"])
def test_an_animation_has_the_times_of_its_frames(tmp_path: Path, name: str) -> None:
    first, *others = moving(tmp_path, 3)
    kind = "PNG" if name == "a.apng" else None
    first.save(tmp_path / name, kind, save_all=True, append_images=others, duration=50)
    assert clip_of(tmp_path / name) == Clip(3, 20.0, (16, 32))


def test_an_animation_without_times_is_refused(tmp_path: Path) -> None:
    """A still image has no rate; frames of no duration have none either."""
    file = tmp_path / "a.gif"
    first, *others = moving(tmp_path, 3)
    first.save(file, save_all=True, append_images=others, duration=0)
    with pytest.raises(mw.DataError, match=r"a\.gif has no frame duration; give its frames as a list.*fps"):
        clip_of(file)
    for name in ("a.gif", "b.GIF", "c.png", "d.apng"):
        kind = "PNG" if "png" in name else None
        first.save(tmp_path / name, kind, save_all=True, append_images=others, duration=50)
        assert clip_of(tmp_path / name) == Clip(3, 20.0, (16, 32))
    first.save(file)
    assert clip_of(file) == Clip(1, 1.0, (16, 32))


def test_a_file_of_sound_alone_is_no_video(tmp_path: Path) -> None:
    file = tmp_path / "a.mkv"
    with av.open(str(file), "w", format="matroska") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 80), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(mw.DataError, match=r"a\.mkv has no video stream"):
        clip_of(file)
    assert clip_of(as_mp4(tmp_path / "a.mp4", 3, 10)).num == 3


@pytest.mark.parametrize(("num", "rate"), [(0, 10), (3, None), (3, 10)])
def test_a_video_must_give_frames_and_a_rate(num: int, rate: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header without a number of frames has them counted; one that promises too many is refused at the last frame."""
    stream = SimpleNamespace(frames=0, average_rate=rate, width=32, height=16)
    image = SimpleNamespace(to_image=lambda: "image")
    opened = SimpleNamespace(streams=SimpleNamespace(video=[stream]), decode=lambda video: iter([image] * num))
    monkeypatch.setattr(vision_files, "_opened", lambda _: contextlib.nullcontext(opened))
    if num and rate:
        assert clip_of(Path("a.mp4")) == Clip(3, 10.0, (16, 32))
        assert len([*read_images([Path("a.mp4")], [0, 2, 2])]) == 3
        with pytest.raises(mw.DataError, match=r"a\.mp4 ends before frame 3, which its header promises"):
            list(read_images([Path("a.mp4")], [0, 3]))
        return
    with pytest.raises(mw.DataError, match=r"a\.mp4 does not give its number of frames or its frame rate"):
        clip_of(Path("a.mp4"))


def test_a_video_with_too_many_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may have any size in its header."""
    stream = SimpleNamespace(frames=3, average_rate=10, width=1 << 14, height=1 << 12)
    opened = SimpleNamespace(streams=SimpleNamespace(video=[stream]))
    monkeypatch.setattr(vision_files, "_opened", lambda _: contextlib.nullcontext(opened))
    assert clip_of(Path("a.mp4")).size == (1 << 12, 1 << 14)
    stream.height += 1
    with pytest.raises(mw.DataError, match=r"a\.mp4 has 16384 x 4097 pixels, above the limit"):
        clip_of(Path("a.mp4"))


def test_any_frame_of_a_video_that_changes_is_noticed(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_bytes(b"1234")
    view = View.read(files, (2, 2, 2), (0, 1, 2), 2.0)
    assert (view.change(), view.num_bytes) == ("", 12)
    files[2].write_bytes(b"1235")
    assert view.change() == f"{files[0]} has other bytes than when the data were read"
    files[1].write_bytes(b"12345")
    assert view.change() == f"{files[0]} had 12 bytes when the data were read, and now has 13"
    files[1].unlink()
    assert view.change() == f"there is no file {files[1]} any more"


@pytest.mark.parametrize(("num_bytes", "whole"), [(19, False), (20, True), (21, True)])
def test_the_size_in_a_webp_leaves_out_its_first_8_bytes(tmp_path: Path, num_bytes: int, whole: bool) -> None:
    (tmp_path / "a").write_bytes((b"RIFF" + (12).to_bytes(4, "little") + bytes(20))[:num_bytes])
    assert vision_files._seems_whole(tmp_path / "a", "WEBP") is whole


def test_a_thumbnail_keeps_the_shape_of_its_image(tmp_path: Path) -> None:
    for size, wanted in (((40, 20), (10, 5)), ((20, 40), (5, 10)), ((8, 6), (8, 6))):
        Image.new("RGB", size).save(tmp_path / "a.png")
        jpeg = base64.b64decode(View.read([tmp_path / "a.png"], (1, 2, 2)).thumbnail(10))
        with Image.open(io.BytesIO(jpeg)) as image:
            assert image.size == wanted


def limited(at: Path, **wishes: Any) -> Processor:
    """Make a processor with settings for images of at most 64 x 64 pixels, and videos of 48 x 48."""
    size = dict(merge_size=2, temporal_patch_size=2, patch_size=4, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    for name, limits in (("preprocessor_config", (256, 4096)), ("video_preprocessor_config", (512, 2304))):
        edges = dict(zip(("shortest_edge", "longest_edge"), limits, strict=True))
        (at / f"{name}.json").write_text(json.dumps({**size, "size": edges}))
    return Processor(at, Placeholders("<i>", "<v>", (1, 2)), 4, ImageLimits(at, **wishes))


@pytest.mark.parametrize(
    ("wishes", "image", "video"),
    [
        ({}, (256, 4096), (512, 2304)), (dict(max_pixels=1024), (256, 1024), (512, 2304)),
        (dict(max_video_pixels=1024), (256, 4096), (512, 1024)),
        (dict(max_pixels=1, max_video_pixels=1), (256, 256), (512, 512)),
        (dict(max_pixels=9999, max_video_pixels=9999), (256, 4096), (512, 2304)),
    ],
)  # fmt: skip
def test_limits_of_images_and_of_videos(tmp_path: Path, wishes: Any, image: Any, video: Any) -> None:
    """A limit of the user is between those of the model, and holds for its own kind."""
    made = limited(tmp_path, **wishes)
    assert made._fitted_size("image", 400, 200) == fitted(400, 200, 8, image)
    assert made._fitted_size("video", 400, 200, 4) == fitted(400, 200, 8, video, 4)


@pytest.mark.parametrize(
    ("settings", "wishes", "clip", "frames"),
    [
        ({}, {}, (100, 25.0), [0, 14, 28, 42, 57, 71, 85, 99]), ({}, {}, (10, 10.0), [0, 3, 6, 9]),
        ({}, {}, (3, 10.0), [0, 1, 2]), ({"min_frames": 2}, {}, (10, 10.0), [0, 9]),
        ({"max_frames": 5}, {}, (101, 10.0), [0, 25, 50, 75, 100]), ({"fps": 3}, {}, (10, 5.0), [0, 2, 4, 5, 7, 9]),
        ({"fps": 3}, dict(fps=0.5), (10, 1.0), [0, 2, 4, 7, 9]),
    ],
)  # fmt: skip
def test_which_frames_of_a_file_are_sampled(
    tmp_path: Path, settings: dict[str, Any], wishes: dict[str, Any], clip: tuple[int, float], frames: list[int]
) -> None:
    """By default 2 per second, and at least 4; those of the user come before those of the model."""
    made = limited(tmp_path, **wishes)
    made._settings["video"] = settings
    assert made._sampled_frames(Clip(*clip, (16, 32))) == frames


@pytest.mark.parametrize(
    ("size", "wanted"), [((4, 16), (8, 32)), ((16, 4), (32, 8)), ((3, 5), (8, 13)), ((8, 9), (8, 9)), ((2, 4), (8, 16))]
)
def test_a_video_smaller_than_a_token_is_enlarged(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert _at_least(8, *size) == wanted


def test_whatever_changes_placeholders_is_in_the_key(tmp_path: Path) -> None:
    same = limited(tmp_path).settings_key
    assert limited(tmp_path).settings_key == same
    others = [limited(tmp_path, **{name: 9}).settings_key for name in ("max_pixels", "max_video_pixels", "fps")]
    others.append(Processor(tmp_path, MARKS, 5, ImageLimits(tmp_path)).settings_key)
    for name in ("preprocessor_config", "video_preprocessor_config", "processor_config"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"another": name}))
        others.append(Processor(tmp_path, MARKS, 4, ImageLimits(tmp_path)).settings_key)
    assert len({same, *others}) == 1 + len(others)


def test_older_names_of_the_limits(tmp_path: Path) -> None:
    """The newer names come first."""
    for newer, limits in ((None, (64, 256)), ({"longest_edge": 128}, (64, 128)), ({"shortest_edge": 16}, (16, 256))):
        settings = {**shown.IMAGE_SETTINGS, "size": newer, "min_pixels": 64, "max_pixels": 256}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
        size = processor(tmp_path, tmp_path)._of("image")["size"]
        assert (size["shortest_edge"], size["longest_edge"]) == limits


def test_paths_of_files(tmp_path: Path) -> None:
    made = processor(tmp_path, tmp_path)
    for name in ("a.png", "b c.png"):
        (tmp_path / name).touch()
        for path in (name, f"file://{name}", str(tmp_path / name), f"file://{tmp_path / name}"):
            assert made._file(path) == tmp_path / name
    for path in ("file://http://x/a.png", "data:image/png;base64,AA", "s3://a.png"):
        with pytest.raises(mw.DataError, match="is not a local path"):
            made._file(path)
