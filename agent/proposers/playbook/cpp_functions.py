"""The C++ functions that generated kernels may need: vectorisable float maths and half-precision conversions.

Polynomials were fitted for this file with mpmath (weighted least squares at Chebyshev nodes); each function stays
within about three units in the last place of float32 and lets infinities and NaNs through. Written so that g++
vectorises a loop around them without -ffast-math.
"""

FUNCTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "bits": (
        (),
        """
static inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }""",
    ),
    "exp_": (
        ("bits",),
        """
// e^x = 2^n * e^r with |r| <= ln(2)/2; two powers of two, so that results down to the denormals come out.
static inline float exp_(float x) {
    float c = x < -104.0f ? -104.0f : x;
    c = c > 89.0f ? 89.0f : c;
    const float shifted = c * 1.44269504f + 12582912.0f;
    const float n = shifted - 12582912.0f;
    const float r = (c - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.394214885e-3f;
    p = p * r + 8.363776149e-3f;
    p = p * r + 4.166636360e-2f;
    p = p * r + 1.666657336e-1f;
    p = p * r + 5.000000029e-1f;
    p = (p * r) * r + r + 1.0f;
    const int32_t k = (int32_t)as_bits(shifted) - 0x4b400000, half = k >> 1;
    return p * as_float((uint32_t)(half + 127) << 23) * as_float((uint32_t)(k - half + 127) << 23);
}""",
    ),
    "power_": (
        ("bits",),
        """
// e^x for a sum with one or larger numbers: as exp_, but 0 below 2^-126 and infinity from 88.4, with one power of two.
static inline float power_(float x) {
    float c = x < -88.0f ? -88.0f : x;
    c = c > 88.8f ? 88.8f : c;
    const float shifted = c * 1.44269504f + 12583039.0f;
    const float n = shifted - 12583039.0f;
    const float r = (c - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.394214885e-3f;
    p = p * r + 8.363776149e-3f;
    p = p * r + 4.166636360e-2f;
    p = p * r + 1.666657336e-1f;
    p = p * r + 5.000000029e-1f;
    p = (p * r) * r + r + 1.0f;
    return p * as_float(as_bits(shifted) << 23);
}""",
    ),
    "sigmoid_": (
        ("power_",),
        """
static inline float sigmoid_(float x) { return 1.0f / (1.0f + power_(-x)); }""",
    ),
    "tanh_": (
        ("power_",),
        """
static inline float tanh_(float x) {
    const float a = __builtin_fabsf(x), s = x * x;
    float p = -5.942228563e-3f;
    p = p * s + 2.088913375e-2f;
    p = p * s - 5.382791203e-2f;
    p = p * s + 1.333261899e-1f;
    p = p * s - 3.333332749e-1f;
    const float small = x + x * s * p;
    const float large = __builtin_copysignf(1.0f - 2.0f / (power_(2.0f * a) + 1.0f), x);
    return a < 0.65f ? small : large;
}""",
    ),
    "erf_": (
        (),
        """
// x * P(x^2) / Q(x^2) up to 3.95, where erf reaches 1.
static inline float erf_(float x) {
    float c = x > 3.95f ? 3.95f : x;
    c = c < -3.95f ? -3.95f : c;
    const float s = c * c;
    float p = 2.025897432e-6f;
    p = p * s + 2.846848842e-4f;
    p = p * s + 3.808108933e-3f;
    p = p * s + 5.287530075e-2f;
    p = p * s + 1.915493020e-1f;
    p = p * s + 1.128379144f;
    float q = 3.783153528e-5f;
    q = q * s + 1.170709422e-3f;
    q = q * s + 1.505499401e-2f;
    q = q * s + 1.145591930e-1f;
    q = q * s + 5.030888257e-1f;
    const float e = c * p / (q * s + 1.0f);
    return e > 1.0f ? 1.0f : (e < -1.0f ? -1.0f : e);
}""",
    ),
    "log_": (
        ("bits",),
        """
static inline float log_(float x) {
    const bool tiny = x < 1.17549435e-38f;
    const float scaled = tiny ? x * 8388608.0f : x;
    const uint32_t bits = as_bits(scaled);
    const int32_t e = (int32_t)(bits - 0x3f3504f3u) >> 23;
    const float n = (float)(tiny ? e - 23 : e);
    const float f = as_float(bits - ((uint32_t)e << 23)) - 1.0f;
    float p = -8.305046642e-2f;
    p = p * f + 1.279876518e-1f;
    p = p * f - 1.294346998e-1f;
    p = p * f + 1.419025612e-1f;
    p = p * f - 1.664348592e-1f;
    p = p * f + 2.000187924e-1f;
    p = p * f - 2.500028089e-1f;
    p = p * f + 3.333332654e-1f;
    float result = n * 0.693145752f + (n * 1.42860677e-6f + (p * f * f * f - 0.5f * f * f) + f);
    result = x == 0.0f ? -INFINITY : result;
    result = x < 0.0f ? NAN : result;
    return x == INFINITY || x != x ? x : result;
}""",
    ),
    "bf16": (
        ("bits",),
        """
static inline float from_bf16(uint16_t x) { return as_float((uint32_t)x << 16); }
static inline uint16_t to_bf16(float x) {
    const uint32_t bits = as_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0u : rounded);
}""",
    ),
    "maximum_": (
        (),
        """
static inline float maximum_(float a, float b) { return a != a ? a : (b != b ? b : (a > b ? a : b)); }
static inline float minimum_(float a, float b) { return a != a ? a : (b != b ? b : (a < b ? a : b)); }""",
    ),
}


def needed(names: set[str]) -> str:
    """The functions named, and what they need, in an order that compiles."""
    wanted: list[str] = []

    def add(name: str) -> None:
        for other in FUNCTIONS[name][0]:
            add(other)
        if name not in wanted:
            wanted.append(name)

    for name in sorted(names):
        add(name)
    return "\n".join(FUNCTIONS[name][1].strip("\n") for name in wanted)
