"""Features of attention calls: masks, windows, softcap, ALiBi, sinks, bias, scales of fp8, rotary embedding."""
