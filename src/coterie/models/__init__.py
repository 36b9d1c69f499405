"""The architectures of the experiments, plain `nn.Module`s."""
