// What the server tells all browsers that watch the same (live.py): the state of a run, points of
// its curves, rows of a grid. A tab that is hidden watches nothing.
export default {
  props: { address: String, drawn: Array, times: Number, state: Object },
  template: `<div>
    <div class="error" role="alert" v-if="error">{{ error }}</div>
    <div class="card" v-if="now">
      <div class="bar"><span :class="'status ' + now.status">{{ now.status }}</span>
        <span class="soft" v-for="job in now.jobs">{{ job }}</span></div>
      <dl><div v-for="[name, value] in now.facts"><dt>{{ name }}</dt><dd>{{ value }}</dd></div></dl>
      <pre v-if="now.error">{{ now.error }}</pre>
      <div class="soft" v-if="now.note">{{ now.note }}</div>
    </div></div>`,
  data() {
    return { error: "", now: this.state };
  },
  watch: {
    address() {
      this.look();
    },
    times() {
      this.asked = false;
      // what came meanwhile; the charts that were drawn are mounted after this
      this.$nextTick(() => this.draw(Object.keys(this.points)));
      // the server may have drawn what was stored a moment before that
      if (this.rows || Object.keys(this.points).length) this.again(2);
    },
  },
  mounted() {
    this.points = {};
    this.pause = 1000;
    document.addEventListener("visibilitychange", this.look);
    this.look();
  },
  unmounted() {
    document.removeEventListener("visibilitychange", this.look);
    clearTimeout(this.retry);
    this.leave();
  },
  methods: {
    look() {
      if (document.hidden) this.leave();
      else if (this.address && !this.socket) this.follow();
    },
    leave() {
      clearTimeout(this.timer);
      const socket = this.socket;
      this.socket = null;
      socket?.close();
    },
    follow() {
      clearTimeout(this.timer);
      const socket = new WebSocket(location.origin.replace(/^http/, "ws") + this.address);
      this.socket = socket;
      socket.onmessage = (event) => {
        this.pause = 1000;
        if (this.socket === socket) this.take(JSON.parse(event.data));
      };
      socket.onclose = () => {
        if (this.socket !== socket) return;
        this.socket = null;
        this.timer = setTimeout(this.look, this.pause);
        this.pause = Math.min(2 * this.pause, 30000);
      };
    },
    take(told) {
      this.error = told.error || "";
      if (told.state) this.now = told.state;
      if (told.points) this.add(told.points, told.whole);
      if (told.rows) this.fill((this.rows = told.rows));
    },
    add(points, whole) {
      if (whole) this.points = {};
      for (const [name, more] of Object.entries(points)) {
        const before = this.points[name] || [];
        const is_sorted = !before.length || !more.length || before.at(-1)[0] < more[0][0];
        this.points[name] = before.concat(more);
        if (!is_sorted) this.points[name].sort((a, b) => a[0] - b[0]);
      }
      this.draw(Object.keys(points));
      this.compare();
    },
    compare() {
      const now = this.rows ? this.rows.map((row) => row.c0) : Object.keys(this.points);
      const is_same = now.length === this.drawn.length && now.every((n) => this.drawn.includes(n));
      if (!is_same && !this.asked) this.$emit("redraw");
      this.asked = !is_same;
    },
    again(seconds) {
      clearTimeout(this.retry);
      this.retry = setTimeout(() => {
        this.asked = false;
        this.compare();
      }, 1000 * seconds);
    },
    draw(names) {
      for (const section of document.querySelectorAll(".chart")) {
        const at = getElement(+section.querySelector(".nicegui-echart").id.slice(1));
        const option = at?.chart?.getOption();
        if (!option) return setTimeout(() => this.draw(names), 50); // it is being mounted
        // what it shows now: `at.options` is what the server drew
        const series = (option.series ?? []).map(({ name, data }) => {
          const points = this.points[name];
          const is_asked = points && names.includes(name);
          const is_new = is_asked && JSON.stringify(points) !== JSON.stringify(data);
          return is_new ? { name, data: points, showSymbol: points.length < 3 } : { name };
        });
        // not where nothing is new: ECharts forgets which point is pointed at
        if (series.some((one) => one.data)) at.chart.setOption({ series });
      }
    },
    fill(rows) {
      this.compare();
      const grid = document.querySelector("main .nicegui-aggrid");
      getElement(+grid.id.slice(1))?.api?.setGridOption("rowData", rows);
    },
  },
};
