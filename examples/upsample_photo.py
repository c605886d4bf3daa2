"""Enlarges a photograph by the bilinear transposed convolution of segmentation heads, in fastconvt and in PyTorch.

FCN, CenterNet and many after them enlarge their maps by a depthwise transposed convolution whose weight is a bilinear
kernel. The photograph comes with scikit-image. Run it: ``python examples/upsample_photo.py --factor 8``
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import fastconvt
from fastconvt.bench.device import choose_device, device_name


def bilinear_weight(channels, factor):
    """The depthwise weight (channels, 1, k, k) with k = 2 * factor - factor % 2."""
    size = 2 * factor - factor % 2
    ramp = 1 - (torch.arange(size) - (size - 1) / 2).abs() / factor
    return (ramp[:, None] * ramp[None, :]).expand(channels, 1, size, size).contiguous()


def enlarge(conv_transpose2d, image, weight, factor):
    """(1, C, H, W) to (1, C, H * factor, W * factor) by any function with the signature of PyTorch's."""
    return conv_transpose2d(image, weight, stride=factor, padding=factor // 2, groups=image.shape[1])


def to_picture(image):
    """(1, C, H, W) in [0, 1] as (H, W, C) bytes."""
    return (image[0].clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()


def timed(function, *arguments):
    """The result, and the least of five times in milliseconds."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        result = function(*arguments)
        if result.is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return result, min(times)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--factor", type=int, default=8, help="how many times larger (default: %(default)s)")
    parser.add_argument("--crop", type=int, default=256, help="side of the part to enlarge (default: %(default)s)")
    parser.add_argument("--device", help="default: a GPU that fastconvt serves, else the CPU")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    try:
        from skimage import data, io
    except ImportError:
        sys.exit("the photograph comes with scikit-image: pip install 'fastconvt[bench]'")

    device, _ = choose_device(options.device)
    photo = data.astronaut()[: options.crop, 100 : 100 + options.crop]
    image = torch.from_numpy(photo.copy()).permute(2, 0, 1)[None].float().div(255).to(device)
    weight = bilinear_weight(image.shape[1], options.factor).to(device)
    ours, our_ms = timed(enlarge, fastconvt.conv_transpose2d, image, weight, options.factor)
    theirs, their_ms = timed(enlarge, F.conv_transpose2d, image, weight, options.factor)
    difference = (ours - theirs).abs()
    largest = difference.max().item()

    options.out.mkdir(parents=True, exist_ok=True)
    # The difference is stretched to the full range of grey: as it is it would be black.
    pictures = {"fastconvt": ours, "pytorch": theirs, "difference": difference / max(largest, 1e-30)}
    for name, picture in pictures.items():
        io.imsave(options.out / f"photo-{name}.png", to_picture(picture), check_contrast=False)
    sizes = " to ".join(f"{height} x {width}" for height, width in (image.shape[2:], ours.shape[2:]))
    print(f"{sizes} pixels on {device_name(device)}: fastconvt {our_ms:.2f} ms, PyTorch {their_ms:.2f} ms")
    print(f"largest difference: {largest:.1e} of a pixel's range (white in photo-difference.png)")
    print(f"pictures: {', '.join(str(options.out / f'photo-{name}.png') for name in pictures)}")


if __name__ == "__main__":
    main()
