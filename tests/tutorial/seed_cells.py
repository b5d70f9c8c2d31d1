"""The PyTorch cells of the tutorial that Amanda's seed had, as printed there.

Changed are only names of today: BERT is made from its configuration instead of
being downloaded (cell 8), and its backward operator is called Addmm and no longer
Mm. The cells for TensorFlow (9, 10 and 14) are left out. They are run one by one
by test_listings.py; as they are printed material, no formatter touches them.
"""

# %% In [1]
import torch
import torch.nn as nn

class ConvNeuralNet(nn.Module):
    def __init__(self, num_classes):
        super(ConvNeuralNet, self).__init__()
        self.conv_layer1 = nn.Conv2d(in_channels=3, out_channels=32, kernel_size=3)
        self.conv_layer2 = nn.Conv2d(in_channels=32, out_channels=32, kernel_size=3)
        self.max_pool1 = nn.MaxPool2d(kernel_size = 2, stride = 2)
        
        self.conv_layer3 = nn.Conv2d(in_channels=32, out_channels=64, kernel_size=3)
        self.conv_layer4 = nn.Conv2d(in_channels=64, out_channels=64, kernel_size=3)
        self.max_pool2 = nn.MaxPool2d(kernel_size = 2, stride = 2)
        
        self.fc1 = nn.Linear(1600, 128)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(128, num_classes)
    
    def forward(self, x):
        out = self.conv_layer1(x)
        out = self.conv_layer2(out)
        out = self.max_pool1(out)
        
        out = self.conv_layer3(out)
        out = self.conv_layer4(out)
        out = self.max_pool2(out)
                
        out = out.reshape(out.size(0), -1)
        
        out = self.fc1(out)
        out = self.relu1(out)
        out = self.fc2(out)
        return out

# %% In [2]
X = torch.rand((1, 3, 32, 32))
model = ConvNeuralNet(num_classes=10)

Y = model(X)
print(Y)

# %% In [3]
import amanda

class CountOPTool(amanda.Tool):
    def __init__(self, op_name: str):
        super().__init__()
        self.counter = 0
        self.op_name = op_name
        self.add_inst_for_op(self.callback)

    # analysis routine, filter conv2d operators
    def callback(self, context: amanda.OpContext):
        op = context.get_op()
        if self.op_name in op.__name__:
            context.insert_before_op(self.counter_op)

    # instrumentation routine: op for counting
    def counter_op(self, *inputs):
        self.counter += 1
        return inputs

# %% In [4]
tool = CountOPTool("conv2d")

with amanda.apply(tool):
    Y = model(X)
    print(f"Calls of conv2d op: {tool.counter}")

# %% In [5]
class CountOPTool(amanda.Tool):
    def __init__(self, op_name: str, backward_op_name: str):
        super().__init__()
        self.counter = 0
        self.backward_counter = 0
        self.op_name = op_name
        self.backward_op_name = backward_op_name
        self.add_inst_for_op(self.callback)
        self.add_inst_for_op(self.backward_callback, backward=True, require_outputs=True)

    # analysis routine, filter conv2d operators
    def callback(self, context: amanda.OpContext):
        op = context.get_op()
        if self.op_name in op.__name__:
            context.insert_before_op(self.counter_op)

    # analysis routine, filter conv2d operators
    def backward_callback(self, context: amanda.OpContext):
        op = context.get_backward_op()
        if self.backward_op_name in op.__name__:
            context.insert_after_backward_op(self.counter_backward_op)

    # instrumentation routine: op for counting
    def counter_op(self, *inputs):
        self.counter += 1
        return inputs
    
    def counter_backward_op(self, *inputs):
        self.backward_counter += 1
        return inputs

# %% In [6]
tool = CountOPTool(op_name="conv2d", backward_op_name="Conv")
X = torch.rand((1, 3, 32, 32))
model = ConvNeuralNet(10)

with amanda.tool.apply(tool):
    Y = model(X)
    Y.backward(torch.rand_like(Y))

    print(f"Calls of conv2d op: {tool.counter}, backward op: {tool.backward_counter}")

# %% In [7]
from torchvision.models import resnet50

x = torch.rand((1, 3, 227, 227))
model = resnet50()

tool = CountOPTool(op_name="conv2d", backward_op_name="Conv")

with amanda.tool.apply(tool):

    y = model(x)
    y.backward(torch.rand_like(y))
    print(f"Calls of conv2d op: {tool.counter}, backward op: {tool.backward_counter}")

# %% In [8]
from transformers import BertConfig, BertModel

x = torch.randint(0, 10, (1,8))
model = BertModel(BertConfig())

tool = CountOPTool(op_name="linear", backward_op_name="Addmm")

with amanda.tool.apply(tool):
    y = model(x)
    y[0].backward(torch.rand_like(y[0]))
    print(f"Calls of linear op: {tool.counter}, backward op: {tool.backward_counter}")

# %% In [11]
from amanda.tools.mapping import MappingTool

def torch_op_name_rule(context: amanda.OpContext):
    context["op_name"] = context.get_op().__name__
    context["backward_op_name"] = context.get_backward_op().__name__ if context.get_backward_op() is not None else None


def tf_op_name_rule(context: amanda.OpContext):
    context["op_name"] = context.get_op().name if context.get_op() is not None else None
    context["backward_op_name"] = context.get_backward_op().name if context.get_backward_op() is not None else None

mapping_tool = MappingTool(
    rules=[
        ["pytorch", torch_op_name_rule],
        ["tensorflow", tf_op_name_rule],
    ]
)

# %% In [12]
class CountOPTool(amanda.Tool):
    def __init__(self, op_name: str, backward_op_name: str):
        super().__init__()

        # specify tool dependencies
        self.depends_on(mapping_tool)

        self.counter = 0
        self.backward_counter = 0
        self.op_name = op_name
        self.backward_op_name = backward_op_name
        self.add_inst_for_op(self.callback)
        self.add_inst_for_op(self.backward_callback, backward=True, require_outputs=True)

    # analysis routine, filter conv2d operators
    def callback(self, context: amanda.OpContext):
        if self.op_name in context["op_name"]:
            context.insert_before_op(self.counter_op)

    # analysis routine, filter conv2d operators
    def backward_callback(self, context: amanda.OpContext):
        if self.backward_op_name in context["backward_op_name"]:
            context.insert_after_backward_op(self.counter_backward_op)

    # instrumentation routine: op for counting
    def counter_op(self, *inputs):
        self.counter += 1
        return inputs
    
    def counter_backward_op(self, *inputs):
        self.backward_counter += 1
        return inputs

# %% In [13]
from torchvision.models import resnet50

x = torch.rand((1, 3, 227, 227))
model = resnet50()

tool = CountOPTool(op_name="conv2d", backward_op_name="Conv")

with amanda.tool.apply(tool):

    y = model(x)
    y.backward(torch.rand_like(y))
    print(f"Execution time of conv2d op: {tool.counter}, backward op: {tool.backward_counter}")

# %% In [15]
def compute_mask(tensor, sparsity):
    with torch.no_grad():
        flattened_tensor = tensor.view(-1)

        num_elements_to_prune = len(flattened_tensor) * sparsity

        _, indices = torch.topk(flattened_tensor, num_elements_to_prune, largest=False)

        mask = torch.zeros_like(flattened_tensor)
        mask[indices] = 1

        flattened_tensor.view(tensor.size())

    return mask

# %% In [16]
class PruningTool(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.add_inst_for_op(self.callback)

    # analysis routine
    def callback(self, context: amanda.OpContext):
        op = context.get_op()
        if op.__name__ not in ["conv2d", "linear"]:
            return
        weight = context.get_inputs()[1]
        mask = compute_mask(weight)
        context["mask"] = mask
        context.insert_before_op(self.prune_weight, inputs=[1], mask=mask)

    # instrumentation routine
    def prune_weight(self, weight, mask):
        return torch.mul(weight, mask)

# %% In [17]
def add_module_hooks(model, op_name, hook):
    if model.__class__.__name__ == op_name:
        model.register_forward_hook(hook)

    if isinstance(model, nn.Module):
        for child_name, child in model.named_children():
            add_module_hooks(child, op_name, hook)

X = torch.rand((1, 3, 32, 32))
model = ConvNeuralNet(num_classes=10)

add_module_hooks(model, 'ReLU', lambda m,i,o: print("hooking relu"))

Y = model(X)

# %% In [18]
class ConvNeuralNet(nn.Module):
    def __init__(self, num_classes):
        super(ConvNeuralNet, self).__init__()
        self.conv_layer1 = nn.Conv2d(in_channels=3, out_channels=32, kernel_size=3)
        self.conv_layer2 = nn.Conv2d(in_channels=32, out_channels=32, kernel_size=3)
        self.max_pool1 = nn.MaxPool2d(kernel_size = 2, stride = 2)
        
        self.conv_layer3 = nn.Conv2d(in_channels=32, out_channels=64, kernel_size=3)
        self.conv_layer4 = nn.Conv2d(in_channels=64, out_channels=64, kernel_size=3)
        self.max_pool2 = nn.MaxPool2d(kernel_size = 2, stride = 2)
        
        self.fc1 = nn.Linear(1600, 128)
        self.fc2 = nn.Linear(128, num_classes)
    
    def forward(self, x):
        out = self.conv_layer1(x)
        out = self.conv_layer2(out)
        out = self.max_pool1(out)
        
        out = self.conv_layer3(out)
        out = self.conv_layer4(out)
        out = self.max_pool2(out)
                
        out = out.reshape(out.size(0), -1)
        
        out = self.fc1(out)
        out = torch.relu(out)
        out = self.fc2(out)
        return out
    
X = torch.rand((1, 3, 32, 32))
model = ConvNeuralNet(num_classes=10)

add_module_hooks(model, 'ReLU', lambda m,i,o: print("hooking relu"))

Y = model(X)

# %% In [19]
X = torch.rand((1, 3, 32, 32))
model = ConvNeuralNet(num_classes=10)

tool = CountOPTool(op_name="relu", backward_op_name="Relu")

with amanda.tool.apply(tool):
    Y = model(X)
    Y.backward(torch.rand_like(Y))
    print(f"Calls of relu op: {tool.counter}, backward op: {tool.backward_counter}")

# %% In [27]
# One to many mapping with rnn example

x = torch.rand(16, 2, 128)
model = torch.nn.RNN(input_size=128, hidden_size=128, num_layers=4, batch_first=False)

tool = CountOPTool(op_name="rnn", backward_op_name="mul")

with amanda.tool.apply(tool):

    y = model(x)
    y[0].backward(torch.rand_like(y[0]))
    print(f"Call of rnn op: {tool.counter}, backward op: {tool.backward_counter}")
