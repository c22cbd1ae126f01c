"""The paper's model of 38 layers; configs/paper.py says where it differs from the paper."""

from configs.paper import paper_config
from twell_jax.training.config import Config


def get_config() -> Config:
    """The configuration."""
    return paper_config(num_layers=38)
