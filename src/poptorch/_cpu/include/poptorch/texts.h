#pragma once
// What makes the texts of errors.
#include <poptorch/pointers.h>
#include <stdexcept>
#include <string>
namespace poptorch {
class Text {
  std::string text_;
 public:
  Text& operator<<(const std::string& text) { text_ += text; return *this; }
  Text& operator<<(int64_t number) { text_ += std::to_string(number); return *this; }
  std::string str() const { return text_; }
};
}  // namespace poptorch
