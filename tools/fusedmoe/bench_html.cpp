#include "bench_html.h"

#include <cctype>
#include <ctime>
#include <filesystem>
#include <sstream>

#include "fusedmoe/error.h"
#include "info.h"

namespace fusedmoe::tool {

extern const char kPageTemplate[];  // generated; empty without d3

namespace {

constexpr const char* kDataMark = "@FUSEDMOE_DATA@";

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

// In quotes where a shell needs them.
std::string shell_word(const std::string& word) {
  bool plain = !word.empty();
  for (const char c : word) {
    plain = plain && (std::isalnum(static_cast<unsigned char>(c)) != 0 ||
                      std::string("-_=,./:+@%").find(c) != std::string::npos);
  }
  if (plain) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

// The command line of this process, without the folder of the program.
std::string command_line() {
  std::ifstream file("/proc/self/cmdline");
  std::string text;
  for (std::string word; std::getline(file, word, '\0');) {
    if (text.empty()) {
      text = std::filesystem::path(word).filename().string();
    } else {
      text += " " + shell_word(word);
    }
  }
  return text;
}

// As text of a <script>: "</" would end it, and "<!--" would change how its end is found.
std::string script_text(const nlohmann::ordered_json& value) {
  using Handler = nlohmann::ordered_json::error_handler_t;
  std::string text;
  for (const char c : value.dump(-1, ' ', false, Handler::replace)) {
    text += c == '<' ? std::string("\\u003c") : std::string(1, c);
  }
  return text;
}

}  // namespace

BenchPage::BenchPage(const std::string& path) : path_(path) {
  if (kPageTemplate[0] == '\0') {
    throw Error(ErrorCode::unsupported,
                "--html: expected a build with d3 for its plots, got one without; install libjs-d3 "
                "(Debian), configure and build again");
  }
  file_.open(path, std::ios::out | std::ios::trunc);
  if (!file_) {
    throw Error(ErrorCode::io, "--html: expected a file that can be written, got " + path +
                                   "; name one in a folder that exists");
  }
}

void BenchPage::write(const std::vector<nlohmann::ordered_json>& rows,
                      const nlohmann::ordered_json& peers,
                      const std::vector<std::string>& warnings) {
  const nlohmann::ordered_json data = {{"date", now_utc()},          {"command", command_line()},
                                       {"machine", machine_facts()}, {"peers", peers},
                                       {"warnings", warnings},       {"rows", rows}};
  std::string page = kPageTemplate;
  const auto mark = page.find(kDataMark);
  page.replace(mark, std::string(kDataMark).size(), script_text(data));
  if (!(file_ << page << std::flush)) {
    throw Error(ErrorCode::io,
                "--html: " + path_ + " cannot be written to its end; is the disk full?");
  }
}

}  // namespace fusedmoe::tool
