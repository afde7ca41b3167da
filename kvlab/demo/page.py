

def write_page(output, capture, pool, steps, gpu):
    return output
