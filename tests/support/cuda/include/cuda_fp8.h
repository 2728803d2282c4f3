#include "../candle.h"
