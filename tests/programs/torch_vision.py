"""Programs of PyTorch: images and volumes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tests.programs.registry import program
from tests.programs.torch_parts import digits, grown, tokens, trained


def _classified(model: torch.nn.Module, images: torch.Tensor, **options: Any) -> Any:
    """Train a classifier of ten classes, then infer."""
    labels = torch.arange(len(images)) % 10
    steps = trained(model, lambda: F.cross_entropy(model(images), labels), **options)
    with torch.no_grad():
        return steps, model.eval()(images)


@program("timm")
def timm_convnext() -> Any:
    """ConvNeXt with stochastic depth, mixup, an average of the weights, and timm's optimizer."""
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    model = timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.2)
    average, mixup = ModelEmaV3(model), Mixup(mixup_alpha=0.8, num_classes=10)
    optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-3)
    images, labels = torch.rand(4, 3, 32, 32), torch.arange(4)

    def loss() -> torch.Tensor:
        average.update(model)
        mixed, targets = mixup(images, labels)
        return SoftTargetCrossEntropy()(model(mixed), targets)

    steps = trained(model, loss, optimizer=optimizer)
    with torch.no_grad():
        return steps, average.module.state_dict(), average.module.eval()(images)


@program("timm")
def timm_swin() -> Any:
    """Swin, windows of attention with shifts and masks, and gradient checkpointing."""
    import timm

    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(2, 2), num_classes=10
    )
    model.set_grad_checkpointing()
    return _classified(model, torch.rand(2, 3, 32, 32), steps=2)


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


@program("torchvision")
def torchvision_segmentation() -> Any:
    """DeepLabV3 on MobileNetV3: dilated convolutions and an auxiliary loss."""
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    model = deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4, aux_loss=True
    )
    images, masks = torch.rand(2, 3, 64, 64), torch.randint(0, 4, (2, 64, 64))

    def loss() -> torch.Tensor:
        outputs = model(images)
        return F.cross_entropy(outputs["out"], masks) + F.cross_entropy(outputs["aux"], masks) / 2

    steps = trained(model, loss, steps=2)
    with torch.no_grad():
        return steps, model.eval()(images)["out"]


@program("vit-pytorch", "einops")
def vit_pytorch_distillation() -> Any:
    """A ViT learns from a MaxViT, which has convolutions and attention over windows and grids."""
    from vit_pytorch.distill import DistillableViT, DistillWrapper
    from vit_pytorch.max_vit import MaxViT

    size = {"dim": 32, "heads": 4, "mlp_dim": 64}
    student = DistillableViT(
        image_size=32, patch_size=8, num_classes=10, depth=2, dropout=0.1, **size
    )
    teacher = MaxViT(
        num_classes=10, dim_conv_stem=16, dim=16, dim_head=8, depth=(1, 1), window_size=4
    )
    model = DistillWrapper(student=student, teacher=teacher, temperature=3, alpha=0.5, hard=False)
    images, labels = torch.rand(2, 3, 32, 32), torch.tensor([1, 2])
    steps = trained(model, lambda: model(images, labels))
    with torch.no_grad():
        return steps, student.eval()(images)


@program("segmentation-models-pytorch", "timm")
def smp_unet() -> Any:
    """A U-Net on ResNet-18 with squeeze-and-excitation in its decoder, Dice loss, scores."""
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet18", encoder_weights=None, classes=3, decoder_attention_type="scse")
    images, masks = torch.rand(2, 3, 64, 64), torch.randint(0, 3, (2, 64, 64))
    criterion = smp.losses.DiceLoss("multiclass")
    steps = trained(model, lambda: criterion(model(images), masks), steps=2)
    with torch.no_grad():
        found = model.eval()(images).argmax(1)
    counts = smp.metrics.get_stats(found, masks, mode="multiclass", num_classes=3)
    return steps, found, smp.metrics.iou_score(*counts, reduction="micro")


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


@program("kornia")
def kornia_augmentation() -> Any:
    """Augmentation that is differentiated: the gradient of images through warps and filters."""
    import kornia
    from kornia import augmentation

    augment = augmentation.AugmentationSequential(
        augmentation.RandomAffine(20.0, p=1.0),
        augmentation.ColorJiggle(0.2, 0.2, p=1.0),
        augmentation.RandomGaussianBlur((3, 3), (0.1, 1.0), p=0.5),
        data_keys=["input"],
    )
    images = torch.rand(2, 3, 32, 32, requires_grad=True)
    results = []
    for _ in range(2):
        warped = augment(images)
        edges = kornia.filters.sobel(kornia.color.rgb_to_grayscale(warped))
        loss = kornia.losses.total_variation(warped).mean() + edges.square().mean()
        results += [loss.detach(), *torch.autograd.grad(loss, [images]), warped.detach()]
    return results, kornia.feature.harris_response(kornia.color.rgb_to_grayscale(images.detach()))


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


@program("diffusers")
def diffusers_autoencoder() -> Any:
    """A variational autoencoder of images, and a transformer that denoises (DiT)."""
    from diffusers import AutoencoderKL, DiTTransformer2DModel

    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    model = AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, **blocks)
    images = torch.rand(2, 3, 16, 16)

    def loss() -> torch.Tensor:
        latent = model.encode(images).latent_dist
        return F.l1_loss(model.decode(latent.sample()).sample, images) + latent.kl().mean() * 1e-3

    steps = trained(model, loss, steps=2)
    dit = DiTTransformer2DModel(2, 8, 4, num_layers=1, sample_size=8, norm_num_groups=4)
    with torch.no_grad():
        noise, labels = torch.randn(1, 4, 8, 8), torch.tensor([3])
        return steps, dit(noise, torch.tensor([5]), labels).sample


@program("open-clip-torch", "timm")
def open_clip_contrastive() -> Any:
    """CLIP: images and texts, a contrastive loss, and classes by their texts."""
    from open_clip import CLIP, ClipLoss

    model = CLIP(
        embed_dim=16,
        vision_cfg={"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 8},
        text_cfg={"context_length": 12, "vocab_size": 100, "width": 32, "heads": 4, "layers": 2},
    )
    images, texts = torch.rand(3, 3, 32, 32), tokens(3, 12)
    steps = trained(model, lambda: ClipLoss()(*model(images, texts)))
    model.eval()
    with torch.no_grad():
        one, other = model.encode_image(images, True), model.encode_text(texts, True)
        return steps, (100 * one @ other.T).softmax(-1)


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
