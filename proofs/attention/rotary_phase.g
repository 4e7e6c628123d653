# The phase of a token at position p <= 2**19 with an inverse frequency f <= 1, held with a relative error:
# z = p times the frequency held, of which the machine returns the nearest number.
@fp32 = float<ieee_32, ne>;

exact = p * f;
phase = fp32(z);

{ p in [1, 1b19] /\ f in [1b-40, 1] /\ |z -/ exact| <= <<rotary.RECIPROCAL_OF_POWER>>
  -> |phase -/ exact| <= <<rotary.RECIPROCAL_OF_POWER + rotary.FP32_UNIT + 2 * rotary.RECIPROCAL_OF_POWER * rotary.FP32_UNIT>>
  /\ |phase - exact| <= <<2**19 * (rotary.RECIPROCAL_OF_POWER + 2 * rotary.FP32_UNIT)>> }
