"""The drivers, which run functions made by ``torch.compile`` as Dynamo captures them."""
