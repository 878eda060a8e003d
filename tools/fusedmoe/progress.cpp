#include "progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

namespace fusedmoe::tool {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kFirstDraw = std::chrono::seconds(2);
constexpr auto kBetweenDraws = std::chrono::milliseconds(100);

}  // namespace

Progress::Progress(std::string label, std::int64_t total)
    : label_(std::move(label)),
      total_(total),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(Clock::now()),
      last_draw_(start_) {}

Progress::~Progress() { erase(); }

void Progress::step(std::int64_t n) {
  done_ += n;
  if (!terminal_) return;
  const auto now = Clock::now();
  if (now - start_ < kFirstDraw || now - last_draw_ < kBetweenDraws) return;
  last_draw_ = now;
  drawn_ = true;
  std::fprintf(stderr, "\r\x1b[K%s %lld of %lld", label_.c_str(), static_cast<long long>(done_),
               static_cast<long long>(total_));
  std::fflush(stderr);
}

void Progress::erase() {
  if (!drawn_) return;
  drawn_ = false;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
}

}  // namespace fusedmoe::tool
