"""Lists of the tiles that a batch really has, with the blocks that each tile visits."""
