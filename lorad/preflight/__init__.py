"""What a spec asks for is looked at before anything starts: model, data, reward, backends and memory."""
