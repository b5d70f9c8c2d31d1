"""Trains a small network, tests it in PyTorch, or in ONNX Runtime: `python serving.py train`.

Nothing here knows of Amanda: `amanda run -t quantize:export=net.onnx -- serving.py test`.
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)
images = torch.rand(2048, 1, 8, 8)
labels = (images[..., :4].sum((1, 2, 3)) > images[..., 4:].sum((1, 2, 3))).long()
unseen, answers = images[1024:], labels[1024:]
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))

if sys.argv[1] == "train":
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[:1024]), labels[:1024]).backward()
        optimizer.step()
    torch.save(net.state_dict(), "net.pt")
elif sys.argv[1] == "test":
    net.load_state_dict(torch.load("net.pt"))
    net.eval()
    with torch.no_grad():
        print(f"PyTorch: {(net(unseen).argmax(1) == answers).float().mean():.1%}")
else:
    import onnxruntime

    session = onnxruntime.InferenceSession("net.onnx")
    found = session.run(None, {session.get_inputs()[0].name: unseen.numpy()})[0]
    print(f"ONNX Runtime: {(found.argmax(1) == answers.numpy()).mean():.1%}")
