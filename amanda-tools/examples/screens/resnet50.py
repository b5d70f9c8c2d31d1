"""Two training steps of torchvision's ResNet-50 with random weights, then an evaluation."""

import torch
import torchvision

torch.manual_seed(0)
model = torchvision.models.resnet50(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(2):
    images, labels = torch.rand(4, 3, 224, 224), torch.arange(4)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")
with torch.no_grad():
    print(f"evaluated {len(model.eval()(torch.rand(8, 3, 224, 224)))} images")
