// Tokens in colors. Vue writes `{{ }}` as text, so that no token is ever read as HTML.
export default {
  props: { pieces: Array, values: Array, low: Number, high: Number },
  template: `<div class="tokens"><span v-for="(piece, i) in pieces" :key="i" :title="title(i)"
    :class="values[i] === null ? 'given' : ''" :style="style(i)">{{ piece }}</span></div>`,
  methods: {
    title(i) {
      return this.values[i] === null ? "given" : this.values[i].toFixed(4);
    },
    // Red below the middle of the range, green above it.
    style(i) {
      const value = this.values[i];
      if (value === null) return "";
      const share = Math.min(1, Math.max(0, (value - this.low) / (this.high - this.low || 1)));
      const strength = Math.abs(share - 0.5) * 2;
      const hue = share < 0.5 ? 4 : 145;
      return `background: hsl(${hue} 65% 50% / ${(strength * 0.45).toFixed(3)})`;
    },
  },
};
