"""Residual networks of the CIFAR kind, with identity mappings: depth 6·blocks + 2.

Blocks are pre-activated, so that the shortcut is the identity from end to end (He et al., "Identity mappings in deep
residual networks", 2016). Where a stage halves the image the shortcut drops every second pixel and fills the new
channels with zeros (option A), which gives ResNet-110 its 1,727,962 parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from thinwire_lab.workloads.lenet import image_shape


class Block(nn.Module):
    """x + conv(relu(bn(conv(relu(bn(x)))))), with a zero-padded shortcut where the shape changes."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(fan_in)
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.stride = stride
        self.new_channels = fan_out - fan_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.conv1(F.relu(self.bn1(x)))
        h = self.conv2(F.relu(self.bn2(h)))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return h + F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))


class ResNet(nn.Module):
    """A CIFAR-style residual network."""

    def __init__(
        self,
        in_shape: tuple[int, ...],
        num_classes: int,
        blocks: int,
        widths: tuple[int, int, int] = (16, 32, 64),
        stem_stride: int = 1,
    ) -> None:
        super().__init__()
        channels, *_ = image_shape(in_shape, "a ResNet")
        self.stem = nn.Conv2d(channels, widths[0], 3, stem_stride, padding=1, bias=False)
        stages: list[nn.Module] = []
        fan_in = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                stages.append(Block(fan_in, width, stride=2 if stage > 0 and block == 0 else 1))
                fan_in = width
        self.blocks = nn.Sequential(*stages)
        self.bn = nn.BatchNorm2d(widths[-1])
        self.fc = nn.Linear(widths[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.bn(self.blocks(self.stem(images))))
        logits: torch.Tensor = self.fc(h.mean(dim=(2, 3)))
        return logits
