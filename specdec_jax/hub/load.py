def load_target(*a): raise NotImplementedError
def load_drafter(*a): raise NotImplementedError
