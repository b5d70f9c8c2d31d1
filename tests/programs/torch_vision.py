"""Programs of PyTorch: images and volumes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tests.programs.registry import program
from tests.programs.torch_parts import digits, grown, trained


@program("timm")
def timm_swin() -> Any:
    """Swin, windows of attention with shifts and masks, and gradient checkpointing."""
    import timm

    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(2, 2), num_classes=10
    )
    model.set_grad_checkpointing()
    images, labels = torch.rand(2, 3, 32, 32), torch.arange(2)
    steps = trained(model, lambda: F.cross_entropy(model(images), labels), steps=2)
    with torch.no_grad():
        return steps, model.eval()(images)


@program("torchvision")
def torchvision_resnet18() -> Any:
    """ResNet-18: transforms, SGD with Nesterov momentum, channels last, bfloat16 autocast."""
    from torchvision import models
    from torchvision.transforms import v2

    model = models.resnet18(num_classes=10).to(memory_format=torch.channels_last)
    augment = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(28), v2.ColorJitter(0.2, 0.2)])
    images, labels = torch.rand(4, 3, 32, 32), torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)

    def loss() -> torch.Tensor:
        batch = augment(images).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch), labels, label_smoothing=0.1)

    steps = trained(model, loss, optimizer=optimizer)
    with torch.no_grad():
        return steps, model.eval()(images)


@program("monai")
def monai_volume() -> Any:
    """A residual U-Net on volumes, random transforms, inference in sliding windows."""
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceCELoss
    from monai.metrics import DiceMetric
    from monai.networks.nets import UNet
    from monai.transforms import Compose, RandFlip, RandGaussianNoise, ScaleIntensity

    model = UNet(3, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, dropout=0.1)
    augment = Compose([ScaleIntensity(), RandFlip(0.5, 0), RandGaussianNoise(0.5)])
    augment.set_random_state(0)
    volumes, masks = torch.rand(2, 1, 16, 16, 16), torch.randint(0, 2, (2, 1, 16, 16, 16))
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)

    def loss() -> torch.Tensor:
        batch = torch.stack([torch.as_tensor(augment(volume)) for volume in volumes])
        return criterion(model(batch), masks)

    steps = trained(model, loss)
    with torch.no_grad():
        whole = sliding_window_inference(torch.rand(1, 1, 24, 24, 24), (16, 16, 16), 1, model)
    return steps, whole, DiceMetric()(whole.argmax(1, keepdim=True), whole.argmax(1, keepdim=True))


@program("diffusers")
def diffusers_ddpm() -> Any:
    """A diffusion model: noise is learned by a U-Net with attention, and images are sampled."""
    from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
    )
    scheduler, average = DDPMScheduler(50), EMAModel(model.parameters())
    images = torch.rand(2, 3, 16, 16)

    def loss() -> torch.Tensor:
        average.step(model.parameters())
        noise, times = torch.randn_like(images), torch.randint(0, 50, (2,))
        noisy = scheduler.add_noise(images, noise, times)
        return F.mse_loss(model(noisy, times).sample, noise)

    steps = trained(model, loss)
    pipeline = DDPMPipeline(model.eval(), DDIMScheduler(50))
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(batch_size=2, num_inference_steps=3, output_type="np").images
    return steps, made, list(average.shadow_params)


@program("torchao")
def torchao_quantized() -> Any:
    """Quantization-aware training of weights in eight bits, then a model that is quantized."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    images, labels = digits()
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    weight = IntxFakeQuantizeConfig(torch.int8, "per_channel")
    quantize_(model, QATConfig(weight_config=weight, step="prepare"))
    trained(model, lambda: F.cross_entropy(model(images), labels))
    weights = grown(model)
    quantize_(model, QATConfig(step="convert"))
    quantize_(model, Int8WeightOnlyConfig())
    with torch.no_grad():
        return weights, model.eval()(images)
