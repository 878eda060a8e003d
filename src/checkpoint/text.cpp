// Implementation of text.h.
#include "checkpoint/text.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr std::size_t kMaxQuoted = 300;

void append_escaped(std::string& out, unsigned char byte) {
  constexpr char kDigits[] = "0123456789abcdef";
  out += "\\x";
  out += kDigits[byte >> 4U];
  out += kDigits[byte & 15U];
}

std::string escape(std::string_view text, bool keep_high_bytes) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool printable = byte >= 0x20 && byte != 0x7f && (byte < 0x80 || keep_high_bytes);
    if (printable) {
      out += c;
    } else {
      append_escaped(out, byte);
    }
  }
  return out;
}

}  // namespace

std::string quote(std::string_view name) {
  std::string_view kept = name;
  if (kept.size() > kMaxQuoted) {
    std::size_t end = kMaxQuoted;
    while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xc0U) == 0x80U) --end;
    kept = name.substr(0, end);
  }
  std::string out = "'" + escape(kept, true);
  if (kept.size() < name.size()) out += "...";
  return out + "'";
}

std::string printable_ascii(std::string_view text) {
  std::string out = escape(text.substr(0, kMaxQuoted), false);
  if (text.size() > kMaxQuoted) out += "...";
  return out;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) out += ", ";
    out += std::to_string(shape[i]);
  }
  return out + "]";
}

void fail_io(std::string_view file, std::string_view text) {
  std::string message(file);
  message += ": ";
  message += text;
  throw Error(ErrorCode::io, message);
}

}  // namespace fusedmoe::checkpoint
