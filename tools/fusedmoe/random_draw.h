// Draws from a seed that give the same on every standard library, unlike std's distributions.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>

namespace fusedmoe::tool {

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}

  std::uint64_t bits() { return random_(); }
  // In [low, high].
  std::int64_t in(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(high - low + 1));
  }
  // In [low, high], as often in each octave.
  std::int64_t log_in(std::int64_t low, std::int64_t high) {
    const double ratio = static_cast<double>(high + 1) / static_cast<double>(low);
    const auto drawn =
        static_cast<std::int64_t>(static_cast<double>(low) * std::pow(ratio, unit()));
    return drawn < low ? low : drawn > high ? high : drawn;
  }
  // One less, exactly, or one more.
  std::int64_t near(std::int64_t edge) { return edge + in(-1, 1); }
  // In [0, 1).
  double unit() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  bool chance(double share) { return unit() < share; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[in(0, static_cast<std::int64_t>(values.size()) - 1)];
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace fusedmoe::tool
