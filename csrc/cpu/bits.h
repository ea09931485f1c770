// The bits of an fp32 as an integer, and back; included within an unnamed namespace.

inline float float_of(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}
inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return bits;
}
